// Converts the bits of `float16` and `bfloat16` to numbers, and numbers to their bits, rounded to the nearest, ties to
// even.

let halves: Float32Array | undefined;

function halfTable(): Float32Array {
  if (halves === undefined) {
    halves = new Float32Array(65_536);
    for (let bits = 0; bits < 65_536; bits += 1) halves[bits] = half(bits);
  }
  return halves;
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

/**
 * Return the numbers whose bits a `float16` or `bfloat16` tensor holds. Both fit a float32 exactly.
 *
 * @param dtype Either dtype.
 * @param bits The tensor's data.
 * @returns A new array of the same length.
 * @example
 * const image = toFloat32("float16", batch.tensors.x.data);
 */
export function toFloat32(dtype: "float16" | "bfloat16", bits: Uint16Array): Float32Array {
  if (dtype === "bfloat16") return new Float32Array(Uint32Array.from(bits, (value) => value << 16).buffer);
  const table = halfTable();
  return Float32Array.from(bits, (value) => table[value] as number);
}

/** Return numbers as the bits of a `float16` or `bfloat16` tensor, rounded to the nearest, ties to even. */
export function fromFloat32(dtype: "float16" | "bfloat16", numbers: ArrayLike<number>): Uint16Array {
  return Uint16Array.from(numbers, dtype === "float16" ? halfBits : brainBits);
}

const SINGLE = new Float32Array(1);
const SINGLE_BITS = new Uint32Array(SINGLE.buffer);

function brainBits(value: number): number {
  SINGLE[0] = value;
  const bits = SINGLE_BITS[0] as number;
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40; // rounding could make it infinite
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function halfBits(value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65_520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | rounded(size * 2 ** 24); // 1024 of them is the smallest normal number
  let exponent = Math.floor(Math.log2(size));
  if (2 ** exponent > size) exponent -= 1; // log2 may round up
  if (2 ** (exponent + 1) <= size) exponent += 1;
  const fraction = rounded((size / 2 ** exponent) * 1024); // 2048 carries over into the exponent
  return sign | (((exponent + 15) << 10) + fraction - 1024);
}

function rounded(value: number): number {
  const floor = Math.floor(value);
  const rest = value - floor;
  return rest > 0.5 || (rest === 0.5 && floor % 2 === 1) ? floor + 1 : floor;
}
