// Acknowledged work: messages leased to this program until it says what became of them.

import { readEachBlock } from "./batches.js";
import { RunnelError } from "./errors.js";

const partOf = ({ delivery, offset }) => [delivery, offset, offset + 1];

/** Messages to work on, each with its `delivery` and how often it failed before. */
export class Consumer {
  #onLate;
  #verbs;
  #queue = []; // bounded by the window
  #leased = new Map(); // by delivery: the offsets that are neither acknowledged nor refused
  #renewing = null;
  #wake = () => {};
  #error = null;

  constructor(onLate, verbs) {
    this.#onLate = onLate;
    this.#verbs = verbs;
  }

  /** The broker has taken us: renew what we have in time, for as long as this program runs. */
  begin([leaseMs]) {
    this.#renewing = setInterval(() => this.renew(), leaseMs / 3);
    this.#renewing.unref();
  }

  // --- What becomes of a message ---

  /** It is done. Does not wait; see `flush`. */
  ack(message) {
    this.#settle(message);
    this.#verbs.ack([], [partOf(message)]);
  }

  /** It failed, and comes again after a delay: this one, or the subscription's. */
  nack(message, { delayMs = null, reason = "" } = {}) {
    this.#settle(message);
    this.#verbs.tell("nack", [partOf(message)], delayMs, reason);
  }

  /** Until everything that was acknowledged is stored, and does not come again. */
  async flush() {
    await this.#verbs.flush(); // an ack with an id that names nothing
  }

  /** Lease anew what we have; done by itself at a third of the lease. */
  renew() {
    if (this.#leased.size > 0) this.#verbs.tell("renew", [...this.#leased.keys()]);
  }

  #settle({ delivery, offset }) {
    const offsets = this.#leased.get(delivery);
    offsets?.delete(offset);
    if (offsets?.size === 0) this.#leased.delete(delivery);
  }

  // --- What the broker says ---

  /** As many blocks as leases, in the same order. */
  add(leases, tail) {
    readEachBlock(tail).forEach((messages, at) => {
      const [delivery, , , , , attempts = []] = leases[at];
      const failures = new Map(attempts.map(([offset, count]) => [Number(offset), count]));
      this.#leased.set(delivery, new Set(messages.map(({ offset }) => offset)));
      for (const message of messages) {
        this.#queue.push({ ...message, delivery, failures: failures.get(message.offset) ?? 0 });
      }
    });
    this.#wake();
  }

  /** Of a key-shared subscription: what is not begun is dropped; what is, is told of when it ends. */
  recall(parts) {
    const isRecalled = ({ delivery, offset }) =>
      parts.some(([id, begin, end]) => id === delivery && begin <= offset && offset < end);
    const dropped = this.#queue.filter(isRecalled);
    this.#queue = this.#queue.filter((message) => !isRecalled(message));
    dropped.forEach((message) => this.#settle(message));
    if (dropped.length > 0) this.#verbs.tell("recalled", dropped.map(partOf));
  }

  late(parts) {
    for (const [delivery, begin, end] of parts) {
      this.#onLate({ delivery, begin: Number(begin), end: Number(end) });
    }
  }

  end(error) {
    clearInterval(this.#renewing);
    this.#error = error;
    this.#wake();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#queue.length === 0 || this.#error) {
          if (this.#error) throw this.#error; // whatever is left is leased to others now
          await new Promise((resolve) => (this.#wake = resolve));
        }
        yield this.#queue.shift();
      }
    } finally {
      if (!this.#error) await this.#leave();
    }
  }

  /** What was acknowledged is stored; what was not goes to others at once. */
  async #leave() {
    await this.flush();
    await this.#verbs.leave();
    this.end(new RunnelError("closed", "this consumer has left", false));
  }
}
