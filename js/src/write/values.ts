// The value of one tensor as a user gives it (array, number, string), checked against the spec and converted to the
// tensor's dtype.

import { SpecMismatch, TooLarge } from "../errors.js";
import { DTYPES, type Dtype, type TypedArray } from "../wire/dtypes.js";
import { fromFloat32 } from "../wire/float16.js";
import { MAX_FIELD_BYTES } from "../wire/limits.js";
import type { TensorSpec } from "../wire/spec.js";

/** A number or a truth value. */
export type Scalar = number | bigint | boolean;
/** Numbers in arrays in arrays. */
export type Nested = readonly (Scalar | Nested)[];
/** A tensor with its shape, such as `column.sample(i)` of a batch. */
export interface Shaped {
  readonly data: TypedArray | Uint8ClampedArray;
  readonly shape: readonly number[];
}
/** One tensor of a sample. A typed array has the shape of the spec. A string is UTF-8 bytes. */
export type Value = TypedArray | Uint8ClampedArray | Shaped | Scalar | Nested | string;

/** A value as the wire carries it. */
export interface Canonical {
  /** Of the array type of the dtype. It may be the caller's own. */
  readonly data: TypedArray;
  readonly shape: readonly number[];
}

const ENCODER = new TextEncoder();
/** A number may become one of a kind of the same or a higher rank: true -> 1 -> 1.0 -> 1+0j. */
// biome-ignore format: a table
const RANKS: Readonly<Record<Dtype, number>> = {
  bool: 0, int8: 1, int16: 1, int32: 1, int64: 1, uint8: 1, uint16: 1, uint32: 1, uint64: 1,
  float16: 2, bfloat16: 2, float32: 2, float64: 2, complex64: 3, complex128: 3, bytes: 4,
};
const FOUND = ["bool", "int64", "float64"] as const;

/** Return the error for a tensor that does not fit the spec, in Python's words. */
export function mismatch(tensor: string, found: string, expected: string, hint = ""): SpecMismatch {
  return new SpecMismatch(`tensor '${tensor}': found ${found}, expected ${expected}${hint && `; ${hint}`}`);
}

/** Return a shape as Python writes it. */
export function told(shape: readonly (number | null)[]): string {
  return `(${shape.map((size) => size ?? "null").join(", ")}${shape.length === 1 ? "," : ""})`;
}

/** Return `a string`, `an Array`: what kind of thing it is. */
export function an(value: unknown): string {
  if (value === undefined || value === null) return "nothing";
  const kind = typeof value === "object" ? (value.constructor?.name ?? "object") : typeof value;
  return `${/^[aeiou]/i.test(kind) && !kind.startsWith("U") ? "an" : "a"} ${kind}`;
}

/** Return the dtype that a typed array implies, or null for anything else. Bits of 16-bit floats are `uint16`. */
export function dtypeOf(value: unknown): Dtype | null {
  if (!ArrayBuffer.isView(value) || value instanceof DataView) return null;
  if (value instanceof Uint8Array || value instanceof Uint8ClampedArray) return "uint8";
  const name = value.constructor.name;
  if (name === "BigInt64Array" || name === "BigUint64Array") return name.slice(3, -5).toLowerCase() as Dtype;
  return name.slice(0, -5).toLowerCase() as Dtype; // Float16Array among them
}

/** Return an array's elements as an array of the dtype's own type: the same memory, under another name at most. */
function sameBits(value: ArrayBufferView, dtype: Dtype): TypedArray {
  const { itemSize, items, view } = DTYPES[dtype];
  return view(value.buffer, value.byteOffset, value.byteLength / (itemSize / items));
}

/** Return whether arrays of one dtype hold the elements of another one, as bits or parts of them. */
function carries(found: Dtype, wanted: Dtype): boolean {
  if (found === wanted) return true;
  const { itemSize, items } = DTYPES[wanted];
  const like = sameBits(new Uint8Array(itemSize), wanted);
  return dtypeOf(like) === found && (items > 1 || wanted === "bool" || wanted.includes("float16"));
}

/**
 * Return one value as the wire carries it.
 *
 * @throws SpecMismatch naming tensor, found and expected, TooLarge for a ragged sample over the limit of a field.
 */
export function canonical(tensor: TensorSpec, value: unknown): Canonical {
  if (tensor.dtype === "bytes") return bounded(tensor, bytesOf(tensor, value));
  if (isShaped(value)) return bounded(tensor, arrayOf(tensor, value.data, value.shape));
  if (dtypeOf(value) !== null) return bounded(tensor, arrayOf(tensor, value as ArrayBufferView, null));
  if (Array.isArray(value) || isScalar(value)) return bounded(tensor, numbersOf(tensor, value as Scalar | Nested));
  const hint =
    typeof value === "string" ? "a tensor holds numbers: number the classes, or give the spec dtype 'bytes'" : "";
  throw mismatch(tensor.name, an(value), `${tensor.dtype} of shape ${told(tensor.shape)}`, hint);
}

export function isShaped(value: unknown): value is Shaped {
  if (typeof value !== "object" || value === null || !("data" in value) || !("shape" in value)) return false;
  return dtypeOf(value.data) !== null && Array.isArray(value.shape);
}

export function isScalar(value: unknown): value is Scalar {
  return typeof value === "number" || typeof value === "bigint" || typeof value === "boolean";
}

/** Return whether a sample of this shape fits the tensor. */
export function admits({ shape: wanted }: TensorSpec, shape: readonly number[]): boolean {
  return (
    shape.length === wanted.length &&
    shape.every((size, axis) => Number.isSafeInteger(size) && size >= 0 && [null, size].includes(wanted[axis] ?? null))
  );
}

function bytesOf(tensor: TensorSpec, value: unknown): Canonical {
  const data = isShaped(value) ? value.data : value;
  if (typeof data === "string") {
    const bytes = ENCODER.encode(data);
    return { data: bytes, shape: [bytes.length] };
  }
  if (!(data instanceof Uint8Array)) throw mismatch(tensor.name, an(value), "bytes", "give a Buffer or a string");
  return { data, shape: [data.length] };
}

function arrayOf(tensor: TensorSpec, value: ArrayBufferView, given: readonly number[] | null): Canonical {
  const { name, dtype } = tensor;
  const found = dtypeOf(value) as Dtype;
  if (!carries(found, dtype)) {
    throw mismatch(name, `dtype ${found}`, `dtype ${dtype}`, `convert it (\`${remedyOf(dtype)}\`)`);
  }
  const data = sameBits(value, dtype);
  const elements = data.length / DTYPES[dtype].items;
  const shape = given ?? shapeOf(tensor, elements);
  if (!admits(tensor, shape))
    throw mismatch(name, `shape ${told(shape)}`, `shape ${told(tensor.shape)}`, advice(tensor, shape));
  if (product(shape) !== elements)
    throw mismatch(name, `${elements} elements`, `${product(shape)} of shape ${told(shape)}`);
  if (dtype === "bool" && (data as Uint8Array).some((one) => one > 1)) {
    throw mismatch(name, "a byte above 1", "0 or 1");
  }
  return { data, shape };
}

/** Return the shape of a flat array, by the spec. At most one of its sizes may be free. */
function shapeOf(tensor: TensorSpec, elements: number): readonly number[] {
  const { name, shape } = tensor;
  const free = shape.indexOf(null);
  const known = product(shape.map((size) => size ?? 1));
  if (free < 0) {
    if (elements === known) return shape as readonly number[];
    const isBatch = known > 0 && elements % known === 0;
    const hint = isBatch ? "writeBatch() writes a batch, one sample a row" : "a size that differs is null in the spec";
    throw mismatch(name, `${elements} elements`, `shape ${told(shape)}`, hint);
  }
  if (shape.indexOf(null, free + 1) >= 0 || known === 0 || elements % known !== 0) {
    throw mismatch(name, `${elements} elements`, `shape ${told(shape)}`, "give its shape: { data, shape }");
  }
  return shape.map((size) => size ?? elements / known);
}

function advice({ shape: wanted }: TensorSpec, shape: readonly number[]): string {
  const rest = { shape: wanted } as TensorSpec;
  if (shape.length === wanted.length + 1 && admits(rest, shape.slice(1))) {
    return "writeBatch() writes a batch, one sample a row";
  }
  return "a size that differs is null in the spec";
}

function remedyOf(dtype: Dtype): string {
  if (dtype === "float16" || dtype === "bfloat16") return `fromFloat32("${dtype}", data)`;
  return `${sameBits(new Uint8Array(DTYPES[dtype].itemSize), dtype).constructor.name}.from(data)`;
}

function bounded(tensor: TensorSpec, value: Canonical): Canonical {
  if (!tensor.isRagged) return value;
  const bytes = value.shape.reduce((size, one) => size * (one || 1), DTYPES[tensor.dtype].itemSize);
  if (bytes <= MAX_FIELD_BYTES) return value;
  throw new TooLarge(`tensor '${tensor.name}': a sample of ${bytes} bytes is over the limit of ${MAX_FIELD_BYTES}`);
}

export function product(sizes: readonly number[]): number {
  return sizes.reduce((size, one) => size * one, 1);
}

// --- numbers ---

/** Numbers in one row, and the shape that their arrays had. */
export interface Flat {
  readonly numbers: readonly Scalar[];
  readonly shape: readonly number[];
  /** 0 for truth values, 1 for integers, 2 for others. */
  readonly rank: number;
}

/** Return nested arrays of numbers in one row, or null if they are not all of one shape, or hold something else. */
export function flat(value: Scalar | Nested): Flat | null {
  const shape: number[] = [];
  for (let part: unknown = value; Array.isArray(part); part = part[0]) shape.push(part.length);
  const numbers: Scalar[] = [];
  const gather = (part: unknown, depth: number): boolean => {
    if (depth === shape.length) {
      if (!isScalar(part)) return false;
      numbers.push(part);
      return true;
    }
    return Array.isArray(part) && part.length === shape[depth] && part.every((one) => gather(one, depth + 1));
  };
  if (!gather(value, 0)) return null;
  return { numbers, shape, rank: numbers.reduce((most: number, one) => Math.max(most, rankOf(one)), 0) };
}

function rankOf(value: Scalar): number {
  if (typeof value === "boolean") return 0;
  return typeof value === "bigint" || Number.isInteger(value) ? 1 : 2;
}

function numbersOf(tensor: TensorSpec, value: Scalar | Nested): Canonical {
  const { name, dtype } = tensor;
  const found = flat(value);
  if (found === null) {
    throw mismatch(
      name,
      "an Array that is no array of numbers of one shape",
      `${dtype} of shape ${told(tensor.shape)}`,
    );
  }
  const { numbers, rank } = found;
  const isEmpty = numbers.length === 0 && found.shape.length === 1 && tensor.shape[0] === null;
  const shape = isEmpty ? tensor.shape.map((size) => size ?? 0) : found.shape; // [] is no boxes, whatever a box's shape
  if (rank > RANKS[dtype]) {
    throw mismatch(name, `dtype ${FOUND[rank as 0 | 1 | 2]}`, `dtype ${dtype}`, "convert it");
  }
  if (!admits(tensor, shape))
    throw mismatch(name, `shape ${told(shape)}`, `shape ${told(tensor.shape)}`, advice(tensor, shape));
  return { data: converted(tensor, numbers), shape };
}

function converted({ name, dtype }: TensorSpec, numbers: readonly Scalar[]): TypedArray {
  const { itemSize, items } = DTYPES[dtype];
  const refuse = (one: Scalar) => mismatch(name, String(one).slice(0, 40), `a value ${dtype} can hold`);
  if (dtype === "float16" || dtype === "bfloat16") {
    const bits = fromFloat32(dtype, numbers.map(Number));
    const infinite = dtype === "float16" ? 0x7c00 : 0x7f80;
    numbers.forEach((one, at) => {
      if (Number.isFinite(Number(one)) && ((bits[at] as number) & 0x7fff) === infinite) throw refuse(one);
    });
    return bits;
  }
  const data = sameBits(new Uint8Array(numbers.length * itemSize), dtype);
  const isBig = data instanceof BigInt64Array || data instanceof BigUint64Array;
  const isRounded = RANKS[dtype] >= 2;
  numbers.forEach((one, at) => {
    if (isBig) data[at] = BigInt(one);
    else data[at * items] = Number(one);
    if (!holds(data[at * items] as number | bigint, one, isRounded)) throw refuse(one);
  });
  return data;
}

/** Return whether no integer changed, and no finite number became infinite. JavaScript's own numbers are rounded. */
function holds(kept: number | bigint, one: Scalar, isRounded: boolean): boolean {
  if (typeof kept === "bigint") return kept === BigInt(one);
  if (typeof one === "bigint") return Number.isInteger(kept) && BigInt(kept) === one;
  const wanted = Number(one);
  return isRounded ? Number.isFinite(kept) || !Number.isFinite(wanted) : kept === wanted;
}
