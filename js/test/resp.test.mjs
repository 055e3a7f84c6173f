// A reply means the same however it is cut into packets, and a broken server can neither fill the memory nor be believed.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ErrorReply, pack, RespReader } from "../dist/server/resp.js";
import { bytesOf, fractionOf, numbers, SEED } from "./random.mjs";

const random = numbers();
const LARGE = bytesOf(random, 70_000);
const HUGE = bytesOf(random, 5_000_000);
const bulk = (value) => Buffer.concat([Buffer.from(`$${value.length}\r\n`), value, Buffer.from("\r\n")]);
const CORPUS = [
  [":0\r\n", 0],
  [":-12\r\n", -12],
  ["+OK\r\n", "OK"],
  ["$0\r\n\r\n", Buffer.alloc(0)],
  ["$5\r\na\r\nb\n\r\n", Buffer.from("a\r\nb\n")],
  ["$-1\r\n", null],
  ["*-1\r\n", null],
  ["*0\r\n", []],
  ["*2\r\n*1\r\n:1\r\n*2\r\n$1\r\nx\r\n*0\r\n", [[1], [Buffer.from("x"), []]]],
  ["-ERR no \u00e9\r\n", new ErrorReply("ERR no \u00e9")],
  ["*2\r\n-WRONGTYPE x\r\n:7\r\n", [new ErrorReply("WRONGTYPE x"), 7]],
  [
    Buffer.concat([Buffer.from("*2\r\n"), bulk(LARGE), bulk(LARGE.subarray(0, 16_385))]),
    [LARGE, LARGE.subarray(0, 16_385)],
  ],
  [bulk(LARGE.subarray(0, 16_384)), LARGE.subarray(0, 16_384)],
];

/** Feed bytes as a socket does: into the room that the reader offers, at most `most()` at once. */
function feed(reader, bytes, most) {
  for (let at = 0; at < bytes.length; ) {
    const room = reader.room();
    assert.ok(room.length > 0);
    const received = Math.min(room.length, bytes.length - at, most());
    bytes.copy(room, 0, at, at + received);
    reader.take(received);
    at += received;
  }
}

function answersTo(bytes, most) {
  const found = [];
  feed(new RespReader((reply) => found.push(reply)), Buffer.from(bytes), most);
  return found;
}

for (const [name, most] of [
  ["whole", () => Number.POSITIVE_INFINITY],
  ["byte by byte", () => 1],
  [`cut at random, seed ${SEED}`, () => 1 + Math.floor(fractionOf(random) ** 4 * 70_000)],
]) {
  test(`replies are read ${name}`, () => {
    const bytes = Buffer.concat(CORPUS.map(([sent]) => Buffer.from(sent)));
    assert.deepEqual(
      answersTo(bytes, most),
      CORPUS.map(([, meant]) => meant),
    );
  });
}

test("memory grows with the bytes that came, not with the announced size", () => {
  const found = [];
  const reader = new RespReader((reply) => found.push(reply));
  feed(reader, Buffer.from("$500000000\r\n"), () => 100);
  assert.ok(reader.room().length <= 2 ** 20);
  const other = new RespReader((reply) => found.push(reply));
  feed(other, bulk(HUGE), () => 300_000);
  assert.deepEqual(found, [HUGE]);
});

test("the memory of a value that is given back is used again, and no other memory", () => {
  const found = [];
  const reader = new RespReader((reply) => found.push(reply));
  const next = (value) => {
    feed(reader, bulk(value), () => Number.POSITIVE_INFINITY);
    return found.at(-1);
  };
  const first = next(LARGE);
  const kept = next(LARGE);
  reader.recycle(first);
  const other = next(LARGE.subarray(0, 69_000));
  assert.equal(other.buffer, first.buffer);
  assert.deepEqual(other, LARGE.subarray(0, 69_000));
  assert.notEqual(next(LARGE).buffer, first.buffer);
  assert.deepEqual(kept, LARGE);
});

test("the memory of small values is not used again, because it belongs to Node's pool", () => {
  const found = [];
  const reader = new RespReader((reply) => found.push(reply));
  const all = () => Number.POSITIVE_INFINITY;
  const smalls = Array.from({ length: 1000 }, (_, at) => Buffer.from(`small value number ${at}`.padEnd(200)));
  for (const small of smalls) feed(reader, bulk(small), all); // more than the pool holds, so some are at its beginning
  const received = found.splice(0);
  for (const one of received) reader.recycle(one);
  for (let at = 0; at < 20; at += 1) feed(reader, bulk(LARGE.subarray(0, 20_000 + 2000 * at)), () => 4096);
  assert.ok(received.every((one, at) => one.equals(smalls[at]))); // deepEqual takes minutes to say what differs
});

for (const [sent, message] of [
  ["HTTP/1.1 400 Bad Request\r\n", /begins with "H"/],
  ["%1\r\n", /begins with "%"/],
  ["$536936449\r\n", /length of 536936449/],
  ["$-2\r\n", /length of -2/],
  ["*4194305\r\n", /length of 4194305/],
  ["$1e3\r\n", /no number/],
  [":\r\n", /no number/],
  [":01\r\n", /no number/],
  [":1\n", /no end/],
  ["$1\r\nab\r\n", /another length/],
  [Buffer.concat([Buffer.from("$20000\r\n"), Buffer.alloc(20_002)]), /another length/],
  ["*1\r\n".repeat(17), /too many levels/],
  ["+".padEnd(70_000, "x"), /does not end/],
]) {
  test(`${String(sent).slice(0, 20).trim()} is refused`, () => {
    assert.throws(() => answersTo(sent, () => Number.POSITIVE_INFINITY), { name: "RangeError", message });
  });
}

test(`noise is refused or read, and nothing else happens, seed ${SEED}`, () => {
  const alphabet = [..."$*:+-0123456789\r\n", "\r\n", "\r\n", "$3\r\nabc\r\n", "*2\r\n"];
  for (let round = 0; round < 5000; round += 1) {
    const pieces = Array.from({ length: 12 }, () => alphabet[random.next().value % alphabet.length]);
    try {
      answersTo(pieces.join(""), () => 1 + (random.next().value % 5));
    } catch (error) {
      assert.equal(error.name, "RangeError", error.stack);
    }
  }
});

test("commands are packed with their sizes in bytes, and large arguments are not copied", () => {
  const payload = Buffer.from("\u00e9\r\n");
  const pieces = [];
  pack(["SET", "\u00e9", payload, "1"], pieces);
  pack(["GET", "\u00e9"], pieces);
  const sent = "*4\r\n$3\r\nSET\r\n$2\r\n\u00e9\r\n$4\r\n\u00e9\r\n\r\n$1\r\n1\r\n*2\r\n$3\r\nGET\r\n$2\r\n\u00e9\r\n";
  assert.equal(Buffer.concat(pieces.map((piece) => Buffer.from(piece))).toString(), sent);
  assert.ok(pieces.includes(payload));
});
