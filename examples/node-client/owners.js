// Follows routes: publishes and fetches at the nodes that own the partitions. Any node would relay, one step more each.

import { RunnelError } from "./errors.js";

const TRIES_MAX = 50;
const PAUSE_MS = 100;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** The nodes behind a connection: `const owners = new Owners(bus, { host, connect })`. Close it before the bus. */
export class Owners {
  #home;
  #host;
  #connect;
  #routes = new Map(); // by topic: the address of each partition's owner
  #links = new Map(); // by address: a promise of a connection

  constructor(home, { host = "127.0.0.1", connect }) {
    this.#home = home;
    this.#host = host;
    this.#connect = connect;
  }

  /** As `bus.publish`. A topic with several partitions needs one to be named. */
  publish(topic, payload, options = {}) {
    return this.#atOwner(topic, options.partition, (bus) => bus.publish(topic, payload, options));
  }

  /** As `bus.fetch`. */
  fetch(topic, options = {}) {
    return this.#atOwner(topic, options.partition, (bus) => bus.fetch(topic, options));
  }

  /** The addresses that this is connected to, besides home. */
  get addresses() {
    return [...this.#links.keys()];
  }

  async close() {
    for (const link of this.#links.values()) await (await link).close();
    this.#links.clear();
  }

  /** Asks the owner. `moved` was done nowhere, so it is asked again, of the owner that the error names. */
  async #atOwner(topic, partition, ask) {
    for (let tries = 1; ; tries++) {
      try {
        return await ask(await this.#link(await this.#address(topic, partition)));
      } catch (error) {
        if (error.code !== "moved" || tries === TRIES_MAX) throw error;
        this.#learn(error.routes);
        if (tries > 1) await pause(PAUSE_MS); // the new owner may not know it yet
      }
    }
  }

  async #address(topic, partition) {
    if (!this.#routes.has(topic)) this.#learn(await this.#home.routes([topic]));
    const addresses = this.#routes.get(topic);
    if (addresses.length > 1 && partition == null) {
      throw new RunnelError("bad_request", `${topic} has ${addresses.length} partitions: name one`, false);
    }
    return addresses[partition ?? 0] ?? "";
  }

  #learn(routes) {
    for (const { topic, owners } of routes) {
      this.#routes.set(topic, owners.map((owner) => owner.address));
    }
  }

  /** The connection to a node. An address without a host is on the host that we have reached; without any, it is home. */
  #link(address) {
    if (address === "") return this.#home;
    if (!this.#links.has(address)) {
      const [host, port] = [address.slice(0, address.lastIndexOf(":")), address.slice(address.lastIndexOf(":") + 1)];
      // With this feature the node does not relay, but says `moved`.
      const link = this.#connect({ host: host || this.#host, port: Number(port), features: ["parts"] });
      this.#links.set(address, link);
      link.catch(() => this.#forget(address));
      link.then((bus) => bus.onEnd(() => this.#forget(address)), () => {});
    }
    return this.#links.get(address);
  }

  /** A lost node: its shards will have other owners. */
  #forget(address) {
    this.#links.delete(address);
    for (const [topic, addresses] of this.#routes) {
      if (addresses.includes(address)) this.#routes.delete(topic);
    }
  }
}
