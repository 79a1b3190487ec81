// Batches as docs/protocol.md draws them: the blocks of a frame become messages, messages a block.

import { decode, encode } from "@msgpack/msgpack";

const MAGIC = Buffer.from("RNB\x01");
const HEADER_BYTES = 24;
const UID_BYTES = 20;
const EMPTY_BYTES = 3; // an empty buffer of a body is nothing but padding
const BODY_HEADER = Buffer.from([0xdc, 0x00, 0x0d]);
const BIN32 = 0xc6;
const NOTHING = Buffer.alloc(0);

export class MalformedError extends Error {}

function check(isRight, problem) {
  if (!isRight) throw new MalformedError(problem);
}

// How many zeros fill a length up to a multiple of 8, and a buffer of a body up to 8k + 3.
export const padding = (length) => (8 - (length % 8)) % 8;
const bodyPadding = (length) => (11 - (length % 8)) % 8;

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let crc = byte;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
  return crc;
});

export function crc32c(...buffers) {
  let crc = 0xffffffff;
  for (const buffer of buffers) {
    for (const byte of buffer) crc = CRC_TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  }
  return ~crc >>> 0;
}

// --- Reading ---

/** The messages of all blocks in the tail of a frame, in their order. */
export const readBlocks = (tail) => readEachBlock(tail).flat();

/** The same, the messages of each block apart. */
export function readEachBlock(tail) {
  const blocks = [];
  for (let position = 0; position < tail.length; ) {
    const messages = [];
    position += readBlock(tail.subarray(position), messages);
    blocks.push(messages);
  }
  return blocks;
}

/** Adds the messages of the first block to `messages`; returns the block's length. */
function readBlock(block, messages) {
  check(block.length >= HEADER_BYTES, "block: shorter than its header");
  check(block.subarray(0, 4).equals(MAGIC), "block: not of version 1");
  const [envelopeBytes, bodyBytes] = [block.readUInt32LE(4), block.readUInt32LE(8)];
  const envelopeEnd = HEADER_BYTES + envelopeBytes;
  const bodyStart = envelopeEnd + padding(envelopeBytes);
  const bodyEnd = bodyStart + bodyBytes;
  const blockBytes = bodyEnd + padding(bodyBytes);
  check(blockBytes <= block.length, "block: incomplete");
  const encoded = block.subarray(HEADER_BYTES, envelopeEnd);
  check(crc32c(block.subarray(0, 20), encoded) === block.readUInt32LE(20), "block: checksum");
  const body = block.subarray(bodyStart, bodyEnd);
  const gaps = [block.subarray(envelopeEnd, bodyStart), block.subarray(bodyEnd, blockBytes)];
  check(Buffer.concat(gaps).every((byte) => byte === 0), "block: padding is not zero");
  const runs = readEnvelope(encoded, body);
  const count = runs.reduce((sum, run) => sum + run.count, 0);
  check(4 * (count + 1) <= bodyBytes, "envelope: more messages than the body can hold");
  const row = readBody(body, count);
  let at = 0;
  for (const { topic, partition, count, baseOffset, receiveTimeNs } of runs) {
    for (let number = 0; number < count; number++) {
      const offset = baseOffset + number;
      messages.push({ topic, partition, offset, receiveTimeNs, ...row(at++) });
    }
  }
  return blockBytes;
}

/** The runs; also whether the envelope fits the body. */
function readEnvelope(encoded, body) {
  const fields = unpack(encoded, "envelope");
  check(Array.isArray(fields) && fields[0] === 1 && fields.length === 16, "envelope: version");
  const topics = fields[1];
  check(Array.isArray(topics) && topics.length > 0, "envelope: topics");
  check(topics.every((topic) => typeof topic === "string"), "envelope: topics");
  const [codec, bodyBytes, bodyCrc] = fields.slice(13);
  check(crc32c(body) === bodyCrc, "body: checksum");
  check(codec === 0, "body: compressed, or of a later version; this small client reads neither");
  check(bodyBytes === body.length, "envelope: body_bytes");
  // A column has a value for each run, or one that stands for all.
  const column = (data, width, read) => {
    check(data?.length === width || data?.length === width * topics.length, "envelope: a column");
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    return topics.map((_, run) => view[read](data.length === width ? 0 : run * width, true));
  };
  const partitions = column(fields[2], 4, "getInt32");
  const counts = column(fields[3], 4, "getInt32");
  const baseOffsets = fields[4]?.length ? column(fields[4], 8, "getBigInt64") : [];
  const receiveTimes = fields[5]?.length ? column(fields[5], 8, "getBigInt64") : [];
  return topics.map((topic, run) => {
    check(partitions[run] >= 0 && counts[run] >= 1, "envelope: partitions or counts");
    const baseOffset = Number(baseOffsets[run] ?? 0);
    const receiveTimeNs = receiveTimes[run] ?? 0n;
    return { topic, partition: partitions[run], count: counts[run], baseOffset, receiveTimeNs };
  });
}

/** A function that gives the columns' part of a row's message. */
function readBody(body, n) {
  check(body.subarray(0, 3).equals(BODY_HEADER), "body: not an array of 13");
  let position = BODY_HEADER.length;
  const take = () => {
    check(body.length >= position + 5 && body[position] === BIN32, "body: no bin 32 header");
    const begin = position + 5;
    position = begin + body.readUInt32BE(position + 1);
    check(position <= body.length, "body: a buffer is cut off");
    return body.subarray(begin, position);
  };
  const exactly = (buffer, length) => {
    check(buffer.length === length + bodyPadding(length), "body: a buffer's length");
    return buffer.subarray(0, length);
  };
  const times = () => {
    const buffer = take();
    if (buffer.length === 11) return () => buffer.readBigInt64LE(0); // one for all
    const values = exactly(buffer, 8 * n);
    return (row) => values.readBigInt64LE(8 * row);
  };
  const strings = (validity) => {
    const [offsetBuffer, data] = [take(), take()];
    if (offsetBuffer.length === EMPTY_BYTES) return null;
    const offsets = exactly(offsetBuffer, 4 * (n + 1));
    const at = (row) => offsets.readInt32LE(4 * row);
    check(at(0) === 0, "body: offsets begin with 0");
    for (let row = 0; row < n; row++) check(at(row) <= at(row + 1), "body: offsets fall");
    const bytes = exactly(data, at(n));
    if (validity.length === EMPTY_BYTES) return (row) => bytes.subarray(at(row), at(row + 1));
    const bits = exactly(validity, 8 * Math.ceil(n / 64));
    const isThere = (row) => bits[row >> 3] & (1 << (row & 7));
    return (row) => (isThere(row) ? bytes.subarray(at(row), at(row + 1)) : null);
  };
  const eventTimeNs = times();
  const transmitTimeNs = times();
  const payload = strings(Buffer.alloc(EMPTY_BYTES));
  check(payload !== null, "body: payloads are missing");
  const key = strings(take()) ?? (() => null);
  const partitionKey = strings(take()) ?? key;
  const uids = take();
  if (uids.length > EMPTY_BYTES) exactly(uids, UID_BYTES * n);
  const uid = (row) => {
    const found = uids.subarray(UID_BYTES * row, UID_BYTES * (row + 1));
    return uids.length > EMPTY_BYTES && found.some((byte) => byte !== 0) ? found : null;
  };
  const tagIndex = take();
  const isForAll = tagIndex.length === 11 && n !== 2;
  if (tagIndex.length > EMPTY_BYTES && !isForAll) exactly(tagIndex, 4 * n);
  const tagSets = unpack(body.subarray(position), "body: tag_sets");
  const tags = (row) => {
    if (tagIndex.length === EMPTY_BYTES) return {};
    const set = tagSets?.[tagIndex.readInt32LE(isForAll ? 0 : 4 * row)];
    check(set !== undefined, "body: tag_index points outside tag_sets");
    return set;
  };
  const columns = { payload, key, partitionKey, tags, eventTimeNs, transmitTimeNs, uid };
  const entries = Object.entries(columns);
  return (row) => Object.fromEntries(entries.map(([name, valueAt]) => [name, valueAt(row)]));
}

function unpack(data, place) {
  try {
    return decode(data, { useBigInt64: true });
  } catch (error) {
    throw new MalformedError(`${place}: ${error.message}`);
  }
}

// --- Writing ---

/** A block with payloads of one topic and partition; `keys` has one for each, or none. */
export function makeBlock(topic, partition, payloads, keys, timeNs) {
  const body = Buffer.concat([
    BODY_HEADER,
    buffer(int64(timeNs)), // event time, one for all
    buffer(int64(timeNs)), // transmit time, one for all
    ...strings(payloads),
    buffer(NOTHING), // key_validity: all have one, or none has
    ...(keys.length ? strings(keys) : [buffer(NOTHING), buffer(NOTHING)]),
    ...Array(5).fill(buffer(NOTHING)), // partition keys, uids, tag_index
    Buffer.from([0x90]), // no tag sets
  ]);
  const runs = [[topic], int32s([partition]), int32s([payloads.length])];
  const unset = Array(5).fill(NOTHING); // base_offsets to rows: the broker's
  const envelope = encode([1, ...runs, ...unset, 0, null, 0, 0, 0, body.length, crc32c(body)]);
  const header = Buffer.alloc(HEADER_BYTES);
  MAGIC.copy(header);
  header.writeUInt32LE(envelope.length, 4);
  header.writeUInt32LE(body.length, 8);
  header.writeUInt32LE(crc32c(header.subarray(0, 20), envelope), 20);
  const filled = (data) => [data, Buffer.alloc(padding(data.length))];
  return Buffer.concat([header, ...filled(envelope), ...filled(body)]);
}

function buffer(data) {
  const header = Buffer.from([BIN32, 0, 0, 0, 0]);
  const fill = Buffer.alloc(bodyPadding(data.length));
  header.writeUInt32BE(data.length + fill.length, 1);
  return Buffer.concat([header, data, fill]);
}

function int64(value) {
  const data = Buffer.alloc(8);
  data.writeBigInt64LE(value);
  return data;
}

function int32s(values) {
  const data = Buffer.alloc(4 * values.length);
  values.forEach((value, at) => data.writeInt32LE(value, 4 * at));
  return data;
}

function strings(values) {
  const offsets = [0];
  for (const value of values) offsets.push(offsets.at(-1) + value.length);
  return [buffer(int32s(offsets)), buffer(Buffer.concat(values))];
}
