// The table of dtypes that the wire carries, by name: item sizes and typed arrays. `float16.ts` converts 16-bit floats.

if (new Uint8Array(Uint16Array.of(1).buffer)[0] !== 1) {
  throw new Error("Penstock needs a little-endian machine: the wire format is little-endian");
}

/** The elements of a tensor. See `DTYPES` for which dtype has which. */
export type TypedArray =
  | Uint8Array
  | Int8Array
  | Int16Array
  | Int32Array
  | Uint16Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array
  | Float32Array
  | Float64Array;

interface Kind {
  /** The bytes of one element on the wire. */
  readonly itemSize: number;
  /** Make a view of `length` items of the array, which starts at an aligned offset. */
  readonly view: (buffer: ArrayBufferLike, offset: number, length: number) => TypedArray;
  /** The items of the typed array that one element takes: 2 for complex numbers. */
  readonly items: number;
}

function kind(
  type: (new (buffer: ArrayBufferLike, offset: number, length: number) => TypedArray) & { BYTES_PER_ELEMENT: number },
  items = 1,
): Kind {
  return {
    itemSize: items * type.BYTES_PER_ELEMENT,
    view: (buffer, offset, length) => new type(buffer, offset, length),
    items,
  };
}

/**
 * Every dtype of wire format v1. `bool` is 0 or 1 in a Uint8Array. `float16` and `bfloat16` are their bits in a
 * Uint16Array (`toFloat32` converts them). Complex numbers are real and imaginary parts in turn.
 */
export const DTYPES = {
  bool: kind(Uint8Array),
  int8: kind(Int8Array),
  int16: kind(Int16Array),
  int32: kind(Int32Array),
  int64: kind(BigInt64Array),
  uint8: kind(Uint8Array),
  uint16: kind(Uint16Array),
  uint32: kind(Uint32Array),
  uint64: kind(BigUint64Array),
  float16: kind(Uint16Array),
  float32: kind(Float32Array),
  float64: kind(Float64Array),
  bfloat16: kind(Uint16Array),
  complex64: kind(Float32Array, 2),
  complex128: kind(Float64Array, 2),
  bytes: kind(Uint8Array),
} as const;

/** The name of a dtype. */
export type Dtype = keyof typeof DTYPES;

/** Return whether a value is the name of a dtype. */
export function isDtype(value: unknown): value is Dtype {
  return typeof value === "string" && Object.hasOwn(DTYPES, value);
}

/**
 * Return bytes as the typed array of a dtype: a view where they are aligned, otherwise a copy.
 *
 * @param dtype The dtype.
 * @param bytes Whole elements, little-endian.
 */
export function typed(dtype: Dtype, bytes: Uint8Array): TypedArray {
  const { itemSize, items, view } = DTYPES[dtype];
  const width = itemSize / items;
  const source = bytes.byteOffset % width === 0 ? bytes : Uint8Array.from(bytes);
  return view(source.buffer, source.byteOffset, source.byteLength / width);
}
