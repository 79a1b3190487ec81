// A client of Runnel over gRPC: what @grpc/proto-loader makes of runnel.proto, and a few words around it.

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const OPTIONS = { keepCase: false, longs: String, enums: String, defaults: true, oneofs: true };
// Deliveries of blocks, and pages of large messages, may be larger than the 4 MiB that clients take by default.
const CHANNEL = { "grpc.max_receive_message_length": 32 * 1024 * 1024 };

const bytes = (value) => (value === undefined ? undefined : Buffer.from(value));

/** Why a call failed: the broker's stable word for it, and whether to try again. */
export class RunnelError extends Error {
  constructor({ code, text, retriable, details }) {
    super(text);
    this.code = code;
    this.retriable = retriable;
    this.details = details ? JSON.parse(details) : {};
  }

  static of(error) {
    const told = (name) => error.metadata?.get(name)[0];
    if (told("runnel-code") === undefined) return error; // no broker's answer: the connection's
    return new RunnelError({
      code: told("runnel-code"),
      text: error.details,
      retriable: told("runnel-retriable") === "true",
      details: told("runnel-details"),
    });
  }
}

export class Runnel {
  #client;
  #metadata = new grpc.Metadata();

  constructor(address, { proto, token, credentials = grpc.credentials.createInsecure() }) {
    const { runnel } = grpc.loadPackageDefinition(loader.loadSync(proto, OPTIONS));
    this.#client = new runnel.v1.Runnel(address, credentials, CHANNEL);
    if (token !== undefined) this.#metadata.set("authorization", `Bearer ${token}`);
  }

  close() {
    this.#client.close();
  }

  /** Any call with one request and one answer, by its name in the .proto: `call("listTopics", { pattern: "a/*" })`. */
  call(method, request) {
    return new Promise((resolve, reject) => {
      this.#client[method](request, this.#metadata, (error, answer) => {
        if (error) reject(RunnelError.of(error));
        else resolve(answer);
      });
    });
  }

  async publish(topic, payload, { key, tags, level } = {}) {
    const message = { topic, payload: bytes(payload), key: bytes(key), tags };
    const { offsets, partitions, ...answer } = await this.call("publish", { messages: [message], level });
    return { topic, partition: partitions[0], offset: offsets[0], level: answer.level };
  }

  /** Publish many without waiting for each: gives the answers, by the order of the payloads. */
  publishAll(topic, payloads, { level } = {}) {
    return new Promise((resolve, reject) => {
      const answers = new Array(payloads.length);
      const stream = this.#client.publishStream(this.#metadata);
      stream.on("data", (response) => {
        for (const { error, ...answer } of response.answers) {
          answers[Number(answer.id) - 1] = error ? new RunnelError(error) : answer;
        }
      });
      stream.on("error", (error) => reject(RunnelError.of(error)));
      stream.on("end", () => resolve(answers));
      payloads.forEach((payload, row) => {
        stream.write({ id: row + 1, topic, level, messages: [{ payload: bytes(payload) }] });
      });
      stream.end();
    });
  }

  fetch(topic, request = {}) {
    return this.call("fetch", { topic, ...request });
  }

  /** Events as they come: `{ event: "delivery", delivery: { messages }, position }`. Leaving the loop ends the call. */
  async *subscribe(patterns, { start, position } = {}) {
    const stream = this.#client.subscribe({ patterns, position, start: start && { kind: start } }, this.#metadata);
    yield* events(stream);
  }

  /** Work as it comes, to be acknowledged with `ack`, `nack` or `extend`. */
  consume(subscription, patterns, { mode, member, options, window } = {}) {
    const stream = this.#client.consume(this.#metadata);
    stream.write({ open: { subscription, patterns, mode, member, options, window } });
    return {
      events: () => events(stream),
      ack: (delivery, id = 0) => stream.write({ ack: { id, deliveries: [delivery] } }),
      nack: (delivery, reason, delayMs) => stream.write({ nack: { deliveries: [delivery], reason, delayMs } }),
      extend: (delivery, leaseMs) => stream.write({ extend: { deliveries: [delivery], leaseMs } }),
      leave: () => stream.end(),
    };
  }
}

async function* events(stream) {
  try {
    for await (const event of stream) yield event;
  } catch (error) {
    throw RunnelError.of(error);
  } finally {
    stream.cancel();
  }
}
