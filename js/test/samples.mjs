// Samples that a number stands for, and what readers of both languages tell of them.
import { createHash } from "node:crypto";

/** Every dtype, fixed and ragged. */
export const EVERY = {
  flag: ["bool", [3]],
  i8: ["int8", [2]],
  i16: ["int16", []],
  i32: ["int32", [1, 2]],
  i64: ["int64", []],
  u8: ["uint8", [2, 2]],
  u16: ["uint16", [3]],
  u32: ["uint32", []],
  u64: ["uint64", [2]],
  half: ["float16", [4]],
  brain: ["bfloat16", [2]],
  f32: ["float32", [2, 3]],
  f64: ["float64", []],
  c64: ["complex64", [2]],
  c128: ["complex128", []],
  text: ["bytes", []],
  boxes: ["float32", [null, 4]],
  grid: ["int16", [null, null]],
  empty: ["float64", [0]],
};

const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
  float16: Uint16Array,
  bfloat16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  complex64: Float32Array,
  complex128: Float64Array,
  bytes: Uint8Array,
};

/** Return bytes that depend on a seed alone. */
export function noise(seed, length) {
  const found = Buffer.alloc(length);
  for (let at = 0; at < length; at += 32) {
    createHash("sha256").update(`${seed}:${at}`).digest().copy(found, at);
  }
  return found;
}

/** Return the sample of a spec that a number stands for: `{ data, shape }` of each tensor. */
export function sampleOf(spec, seed) {
  return Object.fromEntries(
    Object.entries(spec).map(([name, [dtype, sizes]], place) => {
      const type = ARRAYS[dtype];
      const shape = dtype === "bytes" ? [seed % 7] : sizes.map((size, axis) => size ?? (seed + axis) % 4);
      const count = shape.reduce((all, size) => all * size, 1) * (dtype.startsWith("complex") ? 2 : 1);
      const bytes = noise(`${seed}/${place}`, count * type.BYTES_PER_ELEMENT);
      if (dtype === "bool") for (let at = 0; at < bytes.length; at += 1) bytes[at] &= 1;
      return [name, { data: new type(new Uint8Array(bytes).buffer), shape }];
    }),
  );
}

const digest = (parts) => {
  const hash = createHash("sha256");
  for (const { buffer, byteOffset, byteLength } of parts) hash.update(new Uint8Array(buffer, byteOffset, byteLength));
  return hash.digest("hex").slice(0, 16);
};

/** Return what `told` gives for a batch of these samples: identities and digests. */
export function toldSamples(spec, samples) {
  const tensors = Object.entries(spec).map(([name, [dtype, sizes]]) => {
    const values = samples.map(([, sample]) => sample[name]);
    const digests = [digest(values.map(({ data }) => data))];
    if (dtype === "bytes" || sizes.includes(null)) {
      digests.push(digest(values.map(({ shape }) => BigInt64Array.from(shape, BigInt))));
    }
    return [name, digests];
  });
  return [samples.map(([identity]) => identity), Object.fromEntries(tensors)];
}
