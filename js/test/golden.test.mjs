// The golden corpus is read as Python reads it: the same samples to the bit, and the same kinds of error.
import assert from "node:assert/strict";
import { test } from "node:test";
import { BadEntry, decode, offsetsOf, parseSpec, toFloat32, UnsupportedVersion } from "../dist/index.js";
import { cases, fieldsOf, hexOf, usesBlosc2 } from "./corpus.mjs";

/** The elements as the corpus spells them, as numbers or integers that can be compared. */
function valuesOf(dtype, data) {
  const numbers = dtype === "float16" || dtype === "bfloat16" ? toFloat32(dtype, data) : data;
  return Array.from(numbers);
}

function numberOf(text, like) {
  if (typeof like === "bigint") return BigInt(text);
  const words = { nan: Number.NaN, inf: Number.POSITIVE_INFINITY, "-inf": Number.NEGATIVE_INFINITY, True: 1, False: 0 };
  return words[text] ?? Number(text);
}

test("the corpus is there", () => {
  assert.ok(cases("good").length >= 50);
  assert.ok(cases("hostile").length >= 100);
});

for (const found of cases("good").filter((one) => !usesBlosc2(one))) {
  for (const shift of [0, 1]) {
    test(`${found.name} gives back every sample bit for bit, ${shift} bytes off alignment`, () => {
      const { header, columns } = decode(fieldsOf(found, shift), parseSpec(found.spec));
      for (const [key, value] of Object.entries(found.header)) assert.deepEqual(header[key], value, key);
      assert.deepEqual(
        offsetsOf(header),
        found.samples.map(({ offset }) => offset),
      );
      for (const [index, { tensors }] of found.samples.entries()) {
        for (const [name, expected] of Object.entries(tensors)) {
          const { shape, data } = columns.get(name).sample(index);
          assert.deepEqual(shape, expected.shape);
          assert.equal(hexOf(data), expected.hex);
          if (expected.values === undefined) continue;
          const numbers = valuesOf(expected.dtype, data);
          const texts = expected.values.flat();
          assert.deepEqual(
            numbers,
            texts.map((text, at) => numberOf(text, numbers[at])),
          );
        }
      }
    });
  }
}

for (const found of cases("hostile").filter((one) => !usesBlosc2(one))) {
  test(`${found.name} is refused as ${found.error}: ${found.about}`, () => {
    const read = () => decode(fieldsOf(found), parseSpec(found.spec), { takesRefs: found.segments === true });
    assert.throws(read, (error) => error instanceof BadEntry && error.name === found.error);
  });
}

test("every entry with Blosc2 is left to another reader, in one sentence", () => {
  const found = [...cases("good"), ...cases("hostile")].filter(usesBlosc2);
  assert.ok(found.length > 10);
  for (const one of found) {
    const isClear = (error) => error instanceof UnsupportedVersion && /"blosc2".*reads zstd only/.test(error.message);
    assert.throws(() => decode(fieldsOf(one), parseSpec(one.spec)), isClear, one.name);
  }
});

test("a checksum can be left unchecked", () => {
  const found = cases("hostile").find(({ name }) => name === "digest-differs");
  assert.equal(decode(fieldsOf(found), parseSpec(found.spec), { checksum: false }).header.shard, 0);
});
