// A small client of Runnel's native protocol: connect, publish, subscribe, fetch, consume. See docs/protocol.md.

import { connect as openSocket } from "node:net";

import { decode, encode } from "@msgpack/msgpack";

import { makeBlock, padding, readBlocks } from "./batches.js";
import { Consumer } from "./consumer.js";
import { RunnelError } from "./errors.js";

export { Owners } from "./owners.js";
export { RunnelError };

const VERSION = 1;
const PREFIX_BYTES = 8;
const FRAME_BYTES_MAX = 64 * 2 ** 20;
const WINDOW_BYTES = 2 ** 20; // how much of a subscription may be under way
const CONSUMER_BYTES = 8 * 2 ** 20; // how much may be leased to a consumer
const NOTHING = Buffer.alloc(0);

const connectionLost = (text) => new RunnelError("connection_lost", text, true);
const nowNs = () => BigInt(Date.now()) * 1_000_000n;
const routesOf = (routes) =>
  routes.map(([topic, , owners]) => ({
    topic,
    owners: owners.map(([journal, shard, epoch, address = ""]) => ({ journal, shard, epoch, address })),
  }));
const errorOf = ([code, text, retriable, details, routes = []]) =>
  Object.assign(new RunnelError(code, text, retriable, details), { routes: routesOf(routes) });
const toBytes = (value) => (typeof value === "string" ? Buffer.from(value) : value);

/** A connection to a broker, once that has welcomed us. */
export async function connect({ host = "127.0.0.1", port = 7470, features = [] } = {}) {
  const bus = new Bus(openSocket({ host, port, noDelay: true }));
  await bus.greet(features);
  return bus;
}

class Bus {
  #socket;
  #held = NOTHING;
  #nextId = 1;
  #waiting = new Map(); // by id: who waits for the answer
  #subscriptions = new Map(); // by number
  #consumers = new Map(); // by number
  #pings;
  #failure = null;

  constructor(socket) {
    this.#socket = socket;
    socket.on("data", (chunk) => this.#receive(chunk));
    socket.on("error", (error) => this.#fail(connectionLost(error.message)));
    socket.on("close", () => this.#fail(connectionLost("the connection was closed")));
  }

  async greet(features) {
    const { fields } = await this.#ask("hello", [VERSION, features, "runnel-node-example/0.1"]);
    const [, , cluster, node, server, , , , idleTimeoutMs] = fields;
    Object.assign(this, { cluster, node, server });
    this.#pings = setInterval(() => this.ping().catch(() => {}), idleTimeoutMs / 3);
    this.#pings.unref(); // it alone should not keep the program running
  }

  // --- Verbs ---

  /** One message. With level "none" nobody is told whether it arrived. */
  async publish(topic, payload, { key = null, tags = null, partition = null, level = null } = {}) {
    const times = [nowNs(), nowNs()]; // of the event and of sending
    const fields = [level, topic, toBytes(payload), toBytes(key), tags, ...times, partition];
    return this.#publish("send", fields, NOTHING);
  }

  /** Several messages of one topic and partition at once, which is much quicker. */
  async publishBatch(topic, payloads, { keys = [], partition = 0, level = null } = {}) {
    const block = makeBlock(topic, partition, payloads.map(toBytes), keys.map(toBytes), nowNs());
    return this.#publish("publish", [level], block);
  }

  async #publish(name, fields, tail) {
    if (fields[0] === "none") return this.#send(name, [this.#nextId++, ...fields], tail);
    const answer = await this.#ask(name, fields, tail);
    const [baseOffsets, , , , level, , receivers = null] = answer.fields;
    return { offset: Number(baseOffsets[0]), level, receivers };
  }

  /** Messages from an offset on; the next page begins at `nextOffset`. */
  async fetch(topic, { offset = null, partition = null, messagesMax = 0, waitMs = 0 } = {}) {
    const from = offset === null ? null : BigInt(offset);
    const limits = [messagesMax, WINDOW_BYTES, waitMs];
    const { fields, tail } = await this.#ask("fetch", [topic, partition, from, null, ...limits]);
    const [nextOffset, firstOffset, endOffset] = fields.slice(0, 3).map(Number);
    return { messages: readBlocks(tail), nextOffset, firstOffset, endOffset };
  }

  /**
   * Live reading: `for await (const message of await bus.subscribe("sensors/*")) …`. `start` is
   * "latest", "last", "earliest" or an array as the protocol has it; `onGap` hears of what is missed.
   */
  async subscribe(patterns, { start = "latest", onGap = () => {} } = {}) {
    const number = this.#nextId; // any number that is not in use will do
    const subscription = new Subscription(onGap, {
      credit: (bytes) => this.#send("credit", [number, bytes]),
      leave: () => this.#ask("unsubscribe", [number]).then(() => this.#subscriptions.delete(number)),
    });
    this.#subscriptions.set(number, subscription); // before the answer: deliveries follow it closely
    try {
      await this.#ask("subscribe", [number, [patterns].flat(), [start].flat(), WINDOW_BYTES]);
    } catch (error) {
      this.#subscriptions.delete(number);
      throw error;
    }
    return subscription;
  }

  /**
   * Acknowledged work: `for await (const message of consumer) { …; consumer.ack(message); }`. Without
   * patterns the subscription must exist. `onLate` hears of acknowledgements that came too late.
   */
  async consume(
    subscription,
    patterns = [],
    { mode = "", member = "", windowMessages = 256, start = null, onLate = () => {} } = {},
  ) {
    const number = this.#nextId;
    const consumer = new Consumer(onLate, {
      flush: () => this.#ask("ack", [number]),
      tell: (name, ...fields) => this.#failure || this.#send(name, [number, ...fields]),
      ack: (...fields) => this.#failure || this.#send("ack", [0, number, ...fields]),
      leave: () => this.#ask("leave", [number]).then(() => this.#consumers.delete(number)),
    });
    this.#consumers.set(number, consumer); // before the answer: work follows it closely
    const window = [windowMessages, CONSUMER_BYTES];
    const from = start === null ? null : [start].flat();
    try {
      const what = [subscription, [patterns].flat(), mode, ...window, member, from];
      const { fields } = await this.#ask("consume", [number, ...what]);
      consumer.begin(fields[4]);
    } catch (error) {
      this.#consumers.delete(number);
      throw error;
    }
    return consumer;
  }

  /** Who owns the partitions of these topics, and where. `Owners` follows them. */
  async routes(topics) {
    return routesOf((await this.#ask("routes", [topics])).fields[0]);
  }

  /** Calls back when the connection has ended. */
  onEnd(callback) {
    this.#socket.once("close", callback);
  }

  /** The broker's clock, in nanoseconds. */
  async ping() {
    return BigInt((await this.#ask("ping", [])).fields[0]);
  }

  /** The broker answers what is under way, then the connection ends. */
  async close() {
    if (this.#failure) return;
    const closed = new Promise((resolve) => this.#socket.once("close", resolve));
    this.#socket.end();
    await closed;
  }

  // --- Frames ---

  #ask(name, fields, tail = NOTHING) {
    if (this.#failure) return Promise.reject(this.#failure);
    const id = this.#nextId++;
    this.#send(name, [id, ...fields], tail);
    return new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
  }

  #send(name, fields, tail = NOTHING) {
    const head = encode([name, ...fields], { useBigInt64: true });
    const fill = Buffer.alloc(padding(head.length));
    const prefix = Buffer.alloc(PREFIX_BYTES);
    prefix.writeUInt32LE(head.length + fill.length + tail.length, 0);
    prefix.writeUInt32LE(head.length, 4);
    this.#socket.write(Buffer.concat([prefix, head, fill, tail]));
  }

  #receive(chunk) {
    this.#held = Buffer.concat([this.#held, chunk]);
    try {
      while (this.#held.length >= PREFIX_BYTES) {
        const [frameBytes, headBytes] = [this.#held.readUInt32LE(0), this.#held.readUInt32LE(4)];
        const tailAt = PREFIX_BYTES + headBytes + padding(headBytes);
        const end = PREFIX_BYTES + frameBytes;
        if (frameBytes > FRAME_BYTES_MAX || headBytes === 0 || tailAt > end) {
          throw new RunnelError("malformed", "the broker sent a frame that cannot be", false);
        }
        if (this.#held.length < end) return;
        const head = this.#held.subarray(PREFIX_BYTES, PREFIX_BYTES + headBytes);
        const tail = this.#held.subarray(tailAt, end);
        this.#held = this.#held.subarray(end);
        this.#hear(decode(head, { useBigInt64: true }), tail);
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  #hear([name, ...fields], tail) {
    const [number, ...rest] = fields; // an id, or the number of a subscription or a consumer
    switch (name) {
      case "deliver":
        return this.#subscriptions.get(number)?.add({ tail });
      case "gap":
        return this.#subscriptions.get(number)?.add({ tail, gap: rest[0] });
      case "ended":
        this.#subscriptions.get(number)?.end(new RunnelError(...rest));
        return this.#subscriptions.delete(number);
      case "work":
        return this.#consumers.get(number)?.add(rest[0], tail);
      case "recall":
        return this.#consumers.get(number)?.recall(rest[0]);
      case "late":
        return this.#consumers.get(number)?.late(rest[0]);
      case "consumer_ended":
        this.#consumers.get(number)?.end(new RunnelError(...rest));
        return this.#consumers.delete(number);
      case "closing":
        return undefined; // the connection ends soon, and then everybody is told
      case "error":
        if (number === 0) return this.#fail(new RunnelError(...rest));
        this.#waiting.get(number)?.reject(errorOf(rest));
        return this.#waiting.delete(number);
      default:
        this.#waiting.get(number)?.resolve({ fields: rest, tail });
        return this.#waiting.delete(number);
    }
  }

  #fail(error) {
    if (this.#failure) return;
    this.#failure = error;
    clearInterval(this.#pings);
    this.#socket.destroy();
    for (const { reject } of this.#waiting.values()) reject(error);
    for (const subscription of this.#subscriptions.values()) subscription.end(error);
    for (const consumer of this.#consumers.values()) consumer.end(error);
    this.#waiting.clear();
    this.#subscriptions.clear();
    this.#consumers.clear();
  }
}

/** Messages as they come. What has been read is given back to the broker as credit. */
class Subscription {
  #onGap;
  #verbs;
  #queue = []; // bounded by the credit
  #wake = () => {};
  #error = null;

  constructor(onGap, verbs) {
    this.#onGap = onGap;
    this.#verbs = verbs;
  }

  add(item) {
    this.#queue.push(item);
    this.#wake();
  }

  end(error) {
    this.#error = error;
    this.#wake();
  }

  async *[Symbol.asyncIterator]() {
    let readBytes = 0;
    try {
      for (;;) {
        while (this.#queue.length === 0) {
          if (this.#error) throw this.#error;
          await new Promise((resolve) => (this.#wake = resolve));
        }
        const { tail, gap } = this.#queue.shift();
        if (gap) {
          const [reason, missed, topic, partition, firstOffset, nextOffset] = gap;
          this.#onGap({ reason, missed, topic, partition, firstOffset, nextOffset });
        }
        yield* readBlocks(tail);
        readBytes += tail.length;
        if (readBytes >= WINDOW_BYTES / 2 && !this.#error) {
          this.#verbs.credit(readBytes);
          readBytes = 0;
        }
      }
    } finally {
      if (!this.#error) await this.#verbs.leave();
    }
  }
}
