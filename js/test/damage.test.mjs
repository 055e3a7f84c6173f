// A damaged entry is a BadEntry, or reads as a good one: no other error reaches a trainer.
import assert from "node:assert/strict";
import { test } from "node:test";
import { BadEntry, decode, parseSpec } from "../dist/index.js";
import { cases, fieldsOf } from "./corpus.mjs";
import { numbers, SEED } from "./random.mjs";

/** Return an entry with one byte changed, a field cut short, or one digit of the header turned into another. */
function damaged(fields, random) {
  const next = () => random.next().value;
  const copy = fields.map(([name, value]) => [name, Buffer.from(value)]);
  const field = copy[next() % 2 === 0 ? 0 : next() % copy.length];
  const value = field[1];
  if (value.length === 0) return copy;
  if (next() % 8 === 0) field[1] = value.subarray(0, next() % value.length);
  else if (next() % 2 === 0) value[next() % value.length] = next() % 256;
  else {
    const digits = [...value.keys()].filter((at) => value[at] >= 48 && value[at] <= 57);
    if (digits.length > 0) value[digits[next() % digits.length]] = 48 + (next() % 10);
  }
  return copy;
}

test(`10,000 damaged entries are refused or read, seed ${SEED}`, () => {
  const random = numbers();
  const found = [...cases("good"), ...cases("hostile")].filter(({ fields }) => fields.length > 0);
  const entries = found.map((one) => [fieldsOf(one), parseSpec(one.spec)]);
  let refused = 0;
  for (let round = 0; round < 10_000; round += 1) {
    const [fields, spec] = entries[round % entries.length];
    try {
      decode(damaged(fields, random), spec, { checksum: round % 3 > 0, takesRefs: round % 2 > 0 });
    } catch (error) {
      if (!(error instanceof BadEntry)) throw error;
      refused += 1;
    }
  }
  assert.ok(refused > 5_000, `${refused} refused`);
});
