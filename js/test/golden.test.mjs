// The golden corpus is read as Python reads it: the same samples to the bit, and the same kinds of error.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { BadEntry, decode, offsetsOf, parseSpec, toFloat32 } from "../dist/index.js";

const GOLDEN = new URL("../../tests/golden/", import.meta.url);

/** The cases of a folder. `spec` is the text of the spec, because a JavaScript object loses the order of digits. */
function cases(folder) {
  const files = readdirSync(new URL(folder, GOLDEN)).filter((name) => name.endsWith(".json"));
  return files.map((file) => {
    const text = readFileSync(new URL(`${folder}/${file}`, GOLDEN), "utf8");
    return { ...JSON.parse(text), spec: /"spec": (\{.*\}),?\n/.exec(text)[1] };
  });
}

/** The fields as a server sends them. A pad of `shift` bytes in front changes how the values are aligned. */
function fieldsOf(found, shift = 0) {
  return found.fields.map(([name, hex]) => {
    const bytes = Buffer.concat([Buffer.alloc(shift), Buffer.from(hex, "hex")]);
    return [Buffer.from(name), bytes.subarray(shift)];
  });
}

const hexOf = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("hex");

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

for (const found of cases("good")) {
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

for (const found of cases("hostile")) {
  test(`${found.name} is refused as ${found.error}: ${found.about}`, () => {
    const read = () => decode(fieldsOf(found), parseSpec(found.spec), { takesRefs: found.segments === true });
    assert.throws(read, (error) => error instanceof BadEntry && error.name === found.error);
  });
}

test("a checksum can be left unchecked", () => {
  const found = cases("hostile").find(({ name }) => name === "digest-differs");
  assert.equal(decode(fieldsOf(found), parseSpec(found.spec), { checksum: false }).header.shard, 0);
});
