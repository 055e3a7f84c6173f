// The rows of `writeBatch`: the check of n samples that are given tensor by tensor, and the spec that is inferred from
// them.

import { BadSpec } from "../errors.js";
import type { Column } from "../wire/codec.js";
import type { TypedArray } from "../wire/dtypes.js";
import { parseSpec, type Spec, type TensorSpec } from "../wire/spec.js";
import { arrayOf, itemsOf } from "./block.js";
import { checkNames, flattened, inferSpec, type SampleLike, specJson } from "./spec.js";
import { an, type Canonical, canonical, dtypeOf, isShaped, mismatch, type Value } from "./values.js";

/** The samples of one tensor for `writeBatch`: all in one array, one value each, or a column of a batch. */
export type RowValues = Value | readonly Value[] | Column;
/** Tensor name to the samples of a batch. `batch.tensors` of a reader is one. */
export interface RowsLike {
  readonly [name: string]: RowValues | RowsLike;
}

/** The checked rows of `writeBatch`. */
export interface Rows {
  readonly count: number;
  /** All samples of each fixed-size tensor. */
  readonly fixed: readonly TypedArray[];
  /** The samples of each ragged tensor. */
  readonly ragged: readonly (readonly Canonical[])[];
}

/** Check the columns of `writeBatch`, before anything is copied. Raises SpecMismatch or TooLarge. */
export function checkRows(spec: Spec, given: RowsLike): Rows {
  const rows = flattened(given as SampleLike);
  checkNames(spec, rows);
  const fixed: TypedArray[] = [];
  const ragged: Canonical[][] = [];
  let count: number | null = null;
  for (const tensor of spec) {
    const value = rows[tensor.name];
    const values = tensor.isRagged ? raggedRows(tensor, value) : fixedRows(tensor, value);
    const found = values.count;
    if (count !== null && found !== null && found !== count) {
      throw mismatch(tensor.name, `${found} rows`, `${count} rows as in '${spec[0]?.name}'`);
    }
    count ??= found;
    if ("samples" in values) ragged.push(values.samples);
    else fixed.push(values.data);
  }
  if (count === null) {
    throw mismatch(spec[0]?.name as string, "0 elements", "its number of rows", "give its shape: { data, shape }");
  }
  return { count, fixed, ragged };
}

/** Return the samples of one tensor in one array. Of samples without elements, the count is null. */
function fixedRows(tensor: TensorSpec, value: unknown): { count: number | null; data: TypedArray } {
  const items = itemsOf(tensor);
  if (Array.isArray(value)) {
    const samples = value.map((one) => canonical(tensor, one).data);
    const data = arrayOf(tensor, value.length * items);
    samples.forEach((one, row) => {
      data.set(one as never, row * items);
    });
    return { count: value.length, data };
  }
  const shape = isShaped(value) ? value.shape : null;
  const data = isShaped(value) || isColumn(value) ? value.data : value;
  const length = dtypeOf(data) === null ? 0 : (data as TypedArray).length;
  if (shape === null && items === 0 && dtypeOf(data) !== null && length === 0) {
    return { count: null, data: arrayOf(tensor, 0) };
  }
  const count = shape?.[0] ?? length / items;
  if (dtypeOf(data) === null || !Number.isSafeInteger(count)) {
    const found = dtypeOf(data) === null ? an(value) : `${length} elements`;
    throw mismatch(tensor.name, found, `n rows of ${tensor.dtype} [${["n", ...tensor.shape].join(", ")}]`);
  }
  const batch = { ...tensor, shape: [count, ...tensor.shape], sampleBytes: count * tensor.sampleBytes };
  const whole = shape === null ? data : { data, shape };
  return { count, data: canonical(batch, whole).data };
}

function raggedRows(tensor: TensorSpec, value: unknown): { count: number; samples: Canonical[] } {
  if (Array.isArray(value)) return { count: value.length, samples: value.map((one) => canonical(tensor, one)) };
  if (!isColumn(value) || value.shapes === null) {
    throw mismatch(tensor.name, an(value), "an array of one value per sample");
  }
  const count = value.shapes.length / tensor.wireNdim;
  const samples = Array.from({ length: count }, (_, row) => canonical(tensor, value.sample(row)));
  return { count, samples };
}

function isColumn(value: unknown): value is Column {
  return typeof value === "object" && value !== null && "data" in value && "shapes" in value && "sample" in value;
}

/**
 * Return the spec of the first of several rows. A typed array without a shape has one number a row.
 *
 * @throws BadSpec for rows that do not tell it.
 */
export function inferRows(given: RowsLike): Spec {
  const tensors = Object.entries(flattened(given as SampleLike)).map(([name, value]) => {
    if (isColumn(value)) return { ...value.spec, name };
    return inferSpec({ [name]: firstOf(name, value) })[0] as TensorSpec;
  });
  return parseSpec(specJson(tensors));
}

function firstOf(name: string, value: unknown): Value {
  if (Array.isArray(value) && value.length > 0) return value[0];
  if (isShaped(value) && value.shape.length > 0) {
    const [count = 0, ...shape] = value.shape;
    return { data: value.data.subarray(0, count === 0 ? 0 : value.data.length / count), shape };
  }
  if (dtypeOf(value) !== null) return { data: (value as TypedArray).subarray(0, 1), shape: [] };
  throw new BadSpec(`tensor '${name}': ${an(value)} holds no rows to take a spec from; give spec`);
}
