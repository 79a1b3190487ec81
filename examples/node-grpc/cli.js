// Runnel over gRPC from the command line of Node.js: see README.md. Prints a line of JSON for each message or answer.

import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const USAGE = `node cli.js publish TOPIC PAYLOAD… [--key KEY] [--tag NAME=VALUE]… [--level LEVEL]
node cli.js subscribe PATTERN… [--start latest|last|earliest] [--position POSITION] [--count N]
node cli.js consume SUBSCRIPTION [PATTERN]… [--mode shared|key_shared|multicast] [--count N]
node cli.js fetch TOPIC [--offset N] [--count N]
node cli.js topics [PATTERN]
Each with [--address HOST:PORT] [--token TOKEN] [--proto FILE]. Several payloads are published in a stream.`;
const PROTO = fileURLToPath(new URL("../../proto/runnel/v1/runnel.proto", import.meta.url));

const print = (value) => console.log(JSON.stringify(value));
const word = (prefix, value) => (value === undefined ? undefined : `${prefix}_${value.toUpperCase()}`);

function printMessage({ payload, key, partitionKey, uid, ...rest }) {
  print({ ...rest, payload: payload.toString(), key: key?.length ? key.toString() : null });
}

const commands = {
  async publish(bus, [topic, ...payloads], { key, tag, level }) {
    const tags = Object.fromEntries(tag.map((each) => each.split("=", 2)));
    if (payloads.length === 1) {
      print(await bus.publish(topic, payloads[0], { key, tags, level: word("LEVEL", level) }));
    } else {
      const answers = await bus.publishAll(topic, payloads, { level: word("LEVEL", level) });
      print({ offsets: answers.map(({ offsets }) => offsets[0]) });
    }
  },

  async subscribe(bus, patterns, { start, position, count }) {
    const from = position && Buffer.from(position, "base64");
    let left = Number(count);
    for await (const response of bus.subscribe(patterns, { start: word("KIND", start), position: from })) {
      if (response.event === "delivery") {
        response.delivery.messages.forEach(printMessage);
        left -= response.delivery.messages.length;
      }
      print({ event: response.event, position: response.position.toString("base64") });
      if (left <= 0) break;
    }
  },

  async consume(bus, [subscription, ...patterns], { mode, count }) {
    const consumer = bus.consume(subscription, patterns, { mode: word("MODE", mode) });
    let left = Number(count);
    for await (const response of consumer.events()) {
      if (response.event === "consuming") print({ consuming: response.consuming.subscription });
      for (const { delivery, messages } of response.work?.leases ?? []) {
        messages.forEach(printMessage);
        consumer.ack(delivery, delivery);
        left -= messages.length;
      }
      if (response.event === "acked") print({ acked: response.acked.id, late: response.acked.late });
      if (left <= 0 && response.event === "acked") consumer.leave();
    }
  },

  async fetch(bus, [topic], { offset, count }) {
    const { messages, ...page } = await bus.fetch(topic, { offset, messagesMax: count });
    messages.forEach(printMessage);
    print({ nextOffset: page.nextOffset, endOffset: page.endOffset });
  },

  async topics(bus, [pattern]) {
    const { topics } = await bus.call("listTopics", { pattern });
    topics.forEach(({ name, keep, messages }) => print({ name, keep, messages }));
  },
};

function fromCommandLine() {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        help: { type: "boolean", short: "h", default: false },
        address: { type: "string", default: "127.0.0.1:7490" },
        proto: { type: "string", default: PROTO },
        token: { type: "string" },
        key: { type: "string" },
        tag: { type: "string", multiple: true, default: [] },
        level: { type: "string" },
        start: { type: "string" },
        position: { type: "string" },
        mode: { type: "string" },
        offset: { type: "string" },
        count: { type: "string" },
      },
    });
  } catch (error) {
    console.error(`${error.message}\n\n${USAGE}`);
    process.exit(2);
  }
}

const { positionals, values } = fromCommandLine();
if (values.help) {
  console.log(USAGE);
  process.exit(0);
}
const [command, ...rest] = positionals;
if (commands[command] === undefined) {
  console.error(USAGE);
  process.exit(2);
}
// Only now: help needs nothing that `npm install` brings.
const { Runnel } = await import("./runnel.js");
const bus = new Runnel(values.address, values);
try {
  await commands[command](bus, rest, values);
} catch (error) {
  console.error(JSON.stringify({ code: error.code, text: error.message, retriable: error.retriable }));
  process.exitCode = 1;
} finally {
  bus.close();
}
