// Rows of columns as what TensorFlow.js takes: one typed array and a shape for each tensor, by `cast`. TensorFlow.js
// itself is not needed here.

import { TensorRange } from "../errors.js";
import type { Column } from "../wire/codec.js";
import { DTYPES, type Dtype, type TypedArray } from "../wire/dtypes.js";
import { toFloat32 } from "../wire/float16.js";

/** `float32` makes every tensor float32. `native` keeps integers as int32 and bool as bool. */
export type Cast = "float32" | "native";

/** What `tf.tensor` is called with. */
export interface TensorData {
  readonly values: Float32Array | Int32Array | Uint8Array;
  readonly shape: number[];
  readonly dtype: "float32" | "int32" | "bool";
}

/** The rows [from, to) of a column. */
export interface Rows {
  readonly column: Column;
  readonly from: number;
  readonly to: number;
}

/** The largest integer up to which float32 holds every integer. */
const EXACT_IN_FLOAT32 = 2 ** 24;
/** The integers that may be too large for a float32 or an int32. */
const WIDE: ReadonlySet<Dtype> = new Set<Dtype>(["int32", "uint32", "int64", "uint64"]);
const INTEGERS: ReadonlySet<Dtype> = new Set<Dtype>(["int8", "uint8", "int16", "uint16", ...WIDE]);

/**
 * Return rows of one tensor that is not ragged as one tensor with a batch dimension.
 *
 * @param pieces At least one, of columns with one spec.
 * @throws TensorRange for an integer that the tensor does not hold exactly.
 */
export function stacked(pieces: readonly Rows[], cast: Cast): TensorData {
  const { spec } = (pieces[0] as Rows).column;
  const { itemSize, items } = DTYPES[spec.dtype];
  const size = (spec.sampleBytes / itemSize) * items;
  const parts = pieces.map(({ column, from, to }) =>
    converted(spec.name, spec.dtype, column.data.subarray(from * size, to * size), cast),
  );
  const count = pieces.reduce((sum, { from, to }) => sum + to - from, 0);
  return {
    values: joined(parts, count * size),
    shape: shapeOf(spec.dtype, [count, ...(spec.shape as number[])]),
    dtype: dtypeOf(spec.dtype, cast),
  };
}

/** Return one sample of a tensor, ragged or not, without a batch dimension. Raises TensorRange. */
export function single(column: Column, row: number, cast: Cast): TensorData {
  const { name, dtype } = column.spec;
  const { shape, data } = column.sample(row);
  return { values: converted(name, dtype, data, cast), shape: shapeOf(dtype, shape), dtype: dtypeOf(dtype, cast) };
}

/** Complex numbers get a last dimension of 2: real and imaginary part. */
function shapeOf(dtype: Dtype, shape: readonly number[]): number[] {
  return DTYPES[dtype].items === 2 ? [...shape, 2] : [...shape];
}

function dtypeOf(dtype: Dtype, cast: Cast): TensorData["dtype"] {
  if (cast === "float32") return "float32";
  if (dtype === "bool") return "bool";
  return INTEGERS.has(dtype) ? "int32" : "float32";
}

function converted(name: string, dtype: Dtype, data: TypedArray, cast: Cast): TensorData["values"] {
  const target = dtypeOf(dtype, cast);
  if (dtype === "float16" || dtype === "bfloat16") return toFloat32(dtype, data as Uint16Array);
  if (data instanceof BigInt64Array || data instanceof BigUint64Array) {
    const found = target === "int32" ? new Int32Array(data.length) : new Float32Array(data.length);
    for (let at = 0; at < data.length; at += 1) found[at] = within(name, target, data[at] as bigint);
    return found;
  }
  if (WIDE.has(dtype)) for (const value of data) within(name, target, value);
  if (target === "bool") return data as Uint8Array;
  if (target === "int32") return data instanceof Int32Array ? data : Int32Array.from(data);
  return data instanceof Float32Array ? data : new Float32Array(data);
}

function within(name: string, target: TensorData["dtype"], value: number | bigint): number {
  const found = Number(value);
  const isInt32 = (found | 0) === found;
  if (target === "int32" ? isInt32 : Math.abs(found) <= EXACT_IN_FLOAT32) return found;
  const advice = isInt32
    ? 'give cast: "native", or write it as float32'
    : "write it as float32, which rounds it, or in parts";
  throw new TensorRange(`tensor ${name} has the integer ${value}, which ${target} does not hold exactly: ${advice}`);
}

function joined(parts: readonly TensorData["values"][], length: number): TensorData["values"] {
  const first = parts[0] as TensorData["values"];
  if (parts.length === 1) return first;
  const all = new (first.constructor as Float32ArrayConstructor)(length);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
