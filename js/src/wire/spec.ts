// Specs: a stream's tensor names, dtypes and sample shapes, parsed from their JSON form. `write/spec.ts` infers them
// from samples.

import { BadSpec } from "../errors.js";
import { DTYPES, type Dtype, isDtype } from "./dtypes.js";
import { type Json, type JsonObject, parseJson } from "./json.js";
import { MAX_FIELD_BYTES, MAX_NDIM, MAX_TENSORS } from "./limits.js";

const NAME = /^[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}$/;
export const META = "meta";
export const SHAPES_SUFFIX = ".shapes";

/** One tensor of a sample. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: Dtype;
  /** The shape of one sample, without the dimension of the batch. `null` is a size that differs between samples. */
  readonly shape: readonly (number | null)[];
  /** Whether each sample has its own shape. True for `bytes`. */
  readonly isRagged: boolean;
  /** The bytes of one sample of a tensor that is not ragged. */
  readonly sampleBytes: number;
  /** The number of sizes that the wire records for a ragged sample: 1, the length, for `bytes`. */
  readonly wireNdim: number;
}

/** The tensors of every sample of a stream, in wire order. */
export type Spec = readonly TensorSpec[];

/**
 * Parse a spec in its JSON form, as the stream's meta stores it.
 *
 * @param text For example `{"x": ["uint8", [224, 224, 3]], "y": ["int64", []]}`.
 * @returns The tensors in the order of the text.
 * @throws BadSpec for anything that is not a spec.
 * @example
 * const spec = parseSpec('{"x": ["uint8", [2]]}');
 */
export function parseSpec(text: string): Spec {
  let value: Json;
  try {
    value = parseJson(text);
  } catch (error) {
    throw new BadSpec(`the spec is not JSON: ${(error as Error).message}`);
  }
  if (!(value instanceof Map)) throw new BadSpec("the spec is not a JSON object");
  return specOf(value);
}

export function specOf(value: JsonObject): Spec {
  if (value.size < 1 || value.size > MAX_TENSORS) throw new BadSpec(`a sample has 1 to ${MAX_TENSORS} tensors`);
  return Array.from(value, ([name, form]) => tensorOf(name, form));
}

function tensorOf(name: string, form: Json): TensorSpec {
  if (!NAME.test(name) || name === META || name.endsWith(SHAPES_SUFFIX)) {
    throw new BadSpec(`tensor name ${JSON.stringify(name.slice(0, 140))} is not allowed`);
  }
  if (!Array.isArray(form) || form.length !== 2) throw new BadSpec(`tensor ${name}: expected [dtype, shape]`);
  const [dtype, shape] = form;
  if (!isDtype(dtype)) throw new BadSpec(`tensor ${name}: expected a dtype, one of ${Object.keys(DTYPES).join(", ")}`);
  if (!Array.isArray(shape) || shape.length > MAX_NDIM || !shape.every(isSize)) {
    throw new BadSpec(`tensor ${name}: a shape has at most ${MAX_NDIM} sizes, each null or an integer >= 0`);
  }
  const { itemSize } = DTYPES[dtype];
  if (shape.reduce<number>((bytes, size) => bytes * (size || 1), itemSize) > MAX_FIELD_BYTES) {
    throw new BadSpec(`tensor ${name}: one sample is over the limit of ${MAX_FIELD_BYTES} bytes`);
  }
  if (dtype === "bytes" && shape.length > 0) throw new BadSpec(`tensor ${name}: bytes has the shape []`);
  return {
    name,
    dtype,
    shape,
    isRagged: dtype === "bytes" || shape.includes(null),
    sampleBytes: shape.reduce<number>((bytes, size) => bytes * (size ?? 0), itemSize),
    wireNdim: dtype === "bytes" ? 1 : shape.length,
  };
}

function isSize(size: Json): size is number | null {
  return size === null || (typeof size === "number" && size >= 0);
}
