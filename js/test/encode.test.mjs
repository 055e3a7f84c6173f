// A writer in Node makes the bytes that Python makes, and refuses what no reader accepts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { decode, encode, parseSpec, SpecMismatch, TooLarge } from "../dist/index.js";
import { cases, fieldsOf, hexOf, isCompressed } from "./corpus.mjs";

/** Entries that readers take and writers do not make: their headers have another order, other keys or other shapes. */
const READ_ONLY = new Set([
  "empty-holes",
  "escaped-keys",
  "inline-70-samples",
  "keys-in-another-order",
  "repair-is-not-true",
  "shapes-field-of-three",
  "unknown-keys",
]);

for (const found of cases("good").filter((one) => !isCompressed(one))) {
  test(`${found.name} is encoded to ${READ_ONLY.has(found.name) ? "other bytes of the same meaning" : "the same bytes"}`, () => {
    const spec = parseSpec(found.spec);
    const { header, columns } = decode(fieldsOf(found), spec);
    const checksum = header.xxh3 !== null;
    const fields = encode({ ...header, spec, columns, checksum });
    const hex = fields.map(([name, value]) => [name, hexOf(value)]);
    if (!READ_ONLY.has(found.name)) return assert.deepEqual(hex, found.fields);
    assert.notDeepEqual(hex, found.fields);
    const again = decode(fields, spec);
    for (const [name, column] of again.columns) {
      for (let index = 0; index < header.count; index += 1) {
        assert.deepEqual(column.sample(index), columns.get(name).sample(index));
      }
    }
  });
}

const entry = {
  spec: parseSpec('{"x": ["float32", [null]]}'),
  stream: "s",
  epoch: 0,
  shard: 0,
  first: 0,
  count: 2,
  columns: new Map([["x", { data: new Float32Array(3), shapes: Int32Array.of(1, 2) }]]),
};
const column = (data, shapes) => ({ ...entry, columns: new Map([["x", { data, shapes }]]) });

test("the entry that the refusals start from is good", () => {
  assert.equal(decode(encode(entry), entry.spec).header.count, 2);
});

for (const [about, bad, error] of [
  ["a stream's id with a brace", { ...entry, stream: "{s" }, RangeError],
  ["a negative epoch", { ...entry, epoch: -1 }, RangeError],
  ["half a shard", { ...entry, shard: 0.5 }, RangeError],
  ["no samples", { ...entry, count: 0 }, RangeError],
  ["offsets beyond a shard", { ...entry, first: 2 ** 20 - 1 }, RangeError],
  ["holes that fall", { ...entry, holes: [1, 0] }, RangeError],
  ["a hole behind the end", { ...entry, holes: [3] }, RangeError],
  ["a missing tensor", { ...entry, columns: new Map() }, SpecMismatch],
  ["another dtype", column(new Float64Array(3), Int32Array.of(1, 2)), SpecMismatch],
  ["no shapes", column(new Float32Array(3), null), SpecMismatch],
  ["a shape too few", column(new Float32Array(3), Int32Array.of(3)), SpecMismatch],
  ["a negative size", column(new Float32Array(3), Int32Array.of(4, -1)), SpecMismatch],
  ["too few elements", column(new Float32Array(2), Int32Array.of(1, 2)), SpecMismatch],
]) {
  test(`${about} is a ${error.name}`, () => {
    assert.throws(() => encode(bad), error);
  });
}

test("an entry over the limit is TooLarge", () => {
  const spec = parseSpec('{"x": ["uint8", [300000000]]}');
  const columns = new Map([["x", { data: new Uint8Array(600_000_000) }]]);
  assert.throws(() => encode({ ...entry, spec, columns }), TooLarge);
});
