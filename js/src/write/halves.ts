// Converts numbers to the bits of `float16` and `bfloat16`, rounded to the nearest, ties to even. `wire/dtypes.ts`
// converts back.

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
