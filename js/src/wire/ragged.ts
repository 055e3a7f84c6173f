// Ragged tensors: the samples' shapes as an entry carries them, checked, and where each sample starts in the flat
// values.

import { BadEntry } from "../errors.js";
import { DTYPES } from "./dtypes.js";
import type { Json } from "./json.js";
import { MAX_FIELD_BYTES } from "./limits.js";
import type { TensorSpec } from "./spec.js";

/**
 * Return the `shapes` of a header, a list of n lists of sizes, as one array of n * ndim sizes.
 *
 * @throws BadEntry for shapes that the spec forbids.
 */
export function inlineShapes(value: Json | undefined, count: number, tensor: TensorSpec): Int32Array {
  if (!Array.isArray(value) || value.length !== count) {
    throw new BadEntry(`tensor ${tensor.name}: shapes is not a list of ${count} lists`);
  }
  const shapes = new Int32Array(count * tensor.wireNdim);
  value.forEach((shape, sample) => {
    if (!Array.isArray(shape) || shape.length !== tensor.wireNdim || !shape.every((size) => typeof size === "number")) {
      throw new BadEntry(`tensor ${tensor.name}: a sample's shape has not ${tensor.wireNdim} integers`);
    }
    keep(shapes, sample, shape as number[], tensor);
  });
  return shapes;
}

/**
 * Return the `<name>.shapes` field, int64 `[n, ndim]`, as one array of n * ndim sizes.
 *
 * @throws BadEntry for shapes that the spec forbids.
 */
export function readShapes(data: Uint8Array, count: number, tensor: TensorSpec): Int32Array {
  const ndim = tensor.wireNdim;
  if (data.byteLength !== 8 * count * ndim) {
    throw new BadEntry(`${tensor.name}.shapes has ${data.byteLength} bytes, expected ${8 * count * ndim}`);
  }
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const shapes = new Int32Array(count * ndim);
  const shape = new Array<number>(ndim);
  for (let sample = 0; sample < count; sample += 1) {
    for (let axis = 0; axis < ndim; axis += 1) {
      const at = 8 * (sample * ndim + axis);
      // Rounding changes numbers beyond 2^53 only, and those are far over the limit.
      shape[axis] = view.getInt32(at + 4, true) * 2 ** 32 + view.getUint32(at, true);
    }
    keep(shapes, sample, shape, tensor);
  }
  return shapes;
}

function keep(shapes: Int32Array, sample: number, shape: readonly number[], tensor: TensorSpec): void {
  let bytes = DTYPES[tensor.dtype].itemSize;
  for (const [axis, size] of shape.entries()) {
    const wanted = tensor.shape[axis] ?? null;
    if (wanted !== null && size !== wanted) {
      throw new BadEntry(`tensor ${tensor.name}: a sample's shape does not fit the spec`);
    }
    bytes *= Math.max(size, 1);
    if (size < 0 || bytes > MAX_FIELD_BYTES) {
      throw new BadEntry(`tensor ${tensor.name}: a size below 0, or a sample over ${MAX_FIELD_BYTES} bytes`);
    }
  }
  shapes.set(shape, sample * tensor.wireNdim); // below the limit, a size fits 32 bits
}

/**
 * Return where each sample starts in the flat values, and where the last one ends, in elements.
 *
 * @throws BadEntry if all samples together are over the limit of a field.
 */
export function rowStarts(shapes: Int32Array, count: number, tensor: TensorSpec): Float64Array {
  const starts = new Float64Array(count + 1);
  for (let sample = 0; sample < count; sample += 1) {
    let size = 1;
    for (let axis = 0; axis < tensor.wireNdim; axis += 1) size *= shapes[sample * tensor.wireNdim + axis] as number;
    starts[sample + 1] = (starts[sample] as number) + size;
  }
  if ((starts[count] as number) * DTYPES[tensor.dtype].itemSize > MAX_FIELD_BYTES) {
    throw new BadEntry(`tensor ${tensor.name}: its shapes are over the limit of ${MAX_FIELD_BYTES} bytes a field`);
  }
  return starts;
}
