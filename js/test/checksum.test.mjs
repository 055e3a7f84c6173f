// The checksum is XXH3 as others compute it: another one would refuse every entry of Python's writers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createXXHash3 } from "hash-wasm";
import { digestOf } from "../dist/index.js";
import { bytesOf, numbers, SEED } from "./random.mjs";

const other = await createXXHash3(0, 0);
const expected = (bytes) => other.init().update(bytes).digest("hex");
const random = numbers();
const randomBytes = (length) => bytesOf(random, length);
const CAPACITY = 65_536; // of the input in wasm/xxh3.ts

test(`every short length, seed ${SEED}`, () => {
  for (let length = 0; length < 2200; length += 1) {
    const bytes = randomBytes(length);
    assert.equal(digestOf([bytes]), expected(bytes), `${length} bytes`);
  }
});

test(`lengths around the input's capacity, and blocks and stripes behind it, seed ${SEED}`, () => {
  for (const times of [1, 2, 7]) {
    for (const more of [-1025, -1024, -65, -64, -63, -1, 0, 1, 63, 64, 65, 240, 241, 1023, 1024, 1025]) {
      const bytes = randomBytes(CAPACITY * times + more);
      assert.equal(digestOf([bytes]), expected(bytes), `${bytes.length} bytes`);
    }
  }
});

test(`however the bytes are cut into buffers, seed ${SEED}`, () => {
  const bytes = randomBytes(150_000);
  for (let round = 0; round < 200; round += 1) {
    const cuts = [0, ...randomBytes(round % 7).map((one) => one * 580)].sort((a, b) => a - b);
    const pieces = cuts.map((cut, at) => bytes.subarray(cut, cuts[at + 1] ?? bytes.length));
    assert.equal(digestOf(pieces), expected(bytes));
  }
});
