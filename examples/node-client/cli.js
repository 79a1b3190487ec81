// Runnel from the command line of Node.js: see README.md. Prints a line of JSON for each message or answer.

import { parseArgs } from "node:util";

const USAGE = `node cli.js publish TOPIC PAYLOAD… [--key KEY] [--tag NAME=VALUE]… [--level LEVEL]
node cli.js subscribe PATTERN… [--start latest|last|earliest] [--count N]
node cli.js consume SUBSCRIPTION [PATTERN]… [--mode shared|key_shared|multicast] [--count N]
node cli.js fetch TOPIC [--offset N] [--count N]
Each with [--host HOST] [--port PORT]. Several payloads are published as one batch.`;

const text = (bytes) => (bytes === null ? null : Buffer.from(bytes).toString());
const plain = (_, value) => (typeof value === "bigint" ? value.toString() : value);
const print = (value) => console.log(JSON.stringify(value, plain));

function printMessage(message) {
  const { payload, key, partitionKey, uid, ...rest } = message;
  print({ ...rest, payload: text(payload), key: text(key) });
}

const commands = {
  async publish(bus, [topic, ...payloads], { key, tag, level }) {
    const tags = Object.fromEntries(tag.map((each) => each.split("=", 2)));
    if (payloads.length === 1) {
      print(await bus.publish(topic, payloads[0], { key, tags, level }));
    } else {
      const keys = key === undefined ? [] : payloads.map(() => key);
      print(await bus.publishBatch(topic, payloads, { keys, level }));
    }
  },

  async subscribe(bus, patterns, { start, count }) {
    const onGap = (gap) => print({ gap });
    const subscription = await bus.subscribe(patterns, { start, onGap });
    print({ subscribed: patterns });
    let left = Number(count);
    for await (const message of subscription) {
      printMessage(message);
      if (--left === 0) break;
    }
  },

  async consume(bus, [subscription, ...patterns], { mode, count }) {
    const onLate = (late) => print({ late });
    const consumer = await bus.consume(subscription, patterns, { mode, onLate });
    print({ consuming: subscription });
    let left = Number(count);
    for await (const message of consumer) {
      printMessage(message);
      consumer.ack(message);
      if (--left === 0) break;
    }
  },

  async fetch(bus, [topic], { offset, count }) {
    const { messages, ...page } = await bus.fetch(topic, { offset, messagesMax: Number(count) });
    messages.forEach(printMessage);
    print(page);
  },
};

function fromCommandLine() {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        help: { type: "boolean", short: "h", default: false },
        host: { type: "string", default: "127.0.0.1" },
        port: { type: "string", default: "7470" },
        key: { type: "string" },
        tag: { type: "string", multiple: true, default: [] },
        level: { type: "string" },
        mode: { type: "string" },
        start: { type: "string", default: "latest" },
        offset: { type: "string" },
        count: { type: "string", default: "0" },
      },
    });
  } catch (error) {
    console.error(`${error.message}\n\n${USAGE}`);
    process.exit(2);
  }
}

const { values, positionals } = fromCommandLine();
if (values.help) {
  console.log(USAGE);
  process.exit(0);
}
const [command, ...names] = positionals;
if (!(command in commands) || names.length === 0) {
  console.error(USAGE);
  process.exit(2);
}
// Only now: help needs nothing that `npm install` brings.
const { connect } = await import("./runnel.js");
let bus;
try {
  bus = await connect({ host: values.host, port: Number(values.port) });
  await commands[command](bus, names, values);
} catch (error) {
  console.error(`${error.code ?? "error"}: ${error.message}`);
  process.exitCode = 1;
}
await bus?.close();
