// Encodes entries: samples to the fields that Python's writer makes of them, to the byte, with shapes in the header or
// in a field.

import { SpecMismatch, TooLarge } from "../errors.js";
import { digestOf } from "./checksum.js";
import { DTYPES, type TypedArray } from "./dtypes.js";
import { STREAM_ID, VERSION } from "./header.js";
import { MAX_ENTRY_BYTES, MAX_FIELD_BYTES, MAX_HOLES, MAX_SHARD_SAMPLES } from "./limits.js";
import { inlineShapes, rowStarts } from "./ragged.js";
import { META, SHAPES_SUFFIX, type Spec, type TensorSpec } from "./spec.js";

/** The header holds the ragged shapes of up to this many samples. A field of their own holds those of more. */
const INLINE_SAMPLES = 64;
/** Sizes that a writer puts into a header at most, so that the header stays far below its limit. */
const INLINE_SIZES = 16_384;

/** The samples of one tensor, as an entry takes them. A `Column` is one. */
export interface ColumnData {
  /** The elements of all samples in order, each sample in C order. */
  readonly data: TypedArray;
  /** Of a ragged tensor: the shapes of its samples, n * ndim sizes. Of `bytes`: their lengths. */
  readonly shapes?: Int32Array | null;
}

/** The samples and the identity of an entry. A block's `header` and `columns` give all of it. */
export interface EntryContents {
  readonly spec: Spec;
  /** The stream's id, not its name. */
  readonly stream: string;
  readonly epoch: number;
  readonly shard: number;
  /** The offset in the shard of the first sample or hole. */
  readonly first: number;
  /** The number of samples. */
  readonly count: number;
  /** Offsets without a sample, ascending. Default none. */
  readonly holes?: readonly number[];
  /** Tensor name to its samples. */
  readonly columns: ReadonlyMap<string, ColumnData>;
  /** Put the XXH3-64 of the payload into the header. Default true. */
  readonly checksum?: boolean;
  /** Mark the entry as written again for lost samples. Default false. */
  readonly isRepair?: boolean;
}

/**
 * Return the fields of one entry, in order: the bytes that Python's writer makes of the same samples.
 *
 * @param entry The samples and their identity.
 * @returns Names and values. The values of tensors are views of the given data.
 * @throws RangeError for an identity that no reader accepts, SpecMismatch for data of another type or size, and
 *   TooLarge for a field over 512 MB or an entry over 1 GiB.
 * @example
 * const { header, columns } = decode(fields, spec);
 * encode({ ...header, spec, columns }); // the same fields
 */
export function encode(entry: EntryContents): [name: string, value: Uint8Array][] {
  const { spec, stream, epoch, shard, first, count } = entry;
  const holes = entry.holes ?? [];
  checkIdentity(entry, holes);
  const columns = spec.map((tensor) => checked(tensor, entry.columns.get(tensor.name), count));
  const sizes = columns.reduce((sum, { shapes }) => sum + (shapes?.length ?? 0), 0);
  const inline = count <= INLINE_SAMPLES && sizes <= INLINE_SIZES;
  const payload: [string, Uint8Array][] = [];
  const tensors: string[] = [];
  for (const { tensor, data, shapes } of columns) {
    const { name, dtype, shape } = tensor;
    const shown = shapes !== null && inline ? `,"shapes":${JSON.stringify(rows(shapes, count, tensor))}` : "";
    tensors.push(`"${name}":{"dtype":"${dtype}","shape":${JSON.stringify([count, ...shape])}${shown}}`);
    if (shapes !== null && !inline) payload.push([name + SHAPES_SUFFIX, bytesOf(BigInt64Array.from(shapes, BigInt))]);
    payload.push([name, bytesOf(data)]);
  }
  refuseLarge(payload);
  const meta =
    `{"v":${VERSION},"stream":"${stream}","epoch":${epoch},"shard":${shard},"first":${first},"count":${count}` +
    (holes.length > 0 ? `,"holes":${JSON.stringify(holes)}` : "") +
    (entry.isRepair ? ',"repair":true' : "") +
    `,"tensors":{${tensors.join(",")}}` +
    (entry.checksum === false ? "" : `,"xxh3":"${digestOf(payload.map(([, value]) => value))}"`);
  return [[META, new TextEncoder().encode(`${meta}}`)], ...payload];
}

function checkIdentity({ stream, epoch, shard, first, count }: EntryContents, holes: readonly number[]): void {
  const end = first + count + holes.length;
  const isNumber = (value: number) => Number.isSafeInteger(value) && value >= 0;
  if (![epoch, shard, first, count].every(isNumber) || !STREAM_ID.test(stream)) {
    throw new RangeError(`not an identity: stream ${stream}, epoch ${epoch}, shard ${shard}, first ${first}`);
  }
  if (count < 1 || holes.length > MAX_HOLES || end > MAX_SHARD_SAMPLES) {
    throw new RangeError(`a block of ${count} samples, ${holes.length} holes, offsets ${first}-${end}`);
  }
  let next = first;
  for (const hole of holes) {
    if (!Number.isSafeInteger(hole) || hole < next || hole >= end) {
      throw new RangeError(`holes do not rise within offsets ${first} to ${end}`);
    }
    next = hole + 1;
  }
}

interface Checked {
  readonly tensor: TensorSpec;
  readonly data: TypedArray;
  readonly shapes: Int32Array | null;
}

function checked(tensor: TensorSpec, column: ColumnData | undefined, count: number): Checked {
  if (column === undefined) throw new SpecMismatch(`tensor ${tensor.name}: found nothing, expected ${count} samples`);
  const { itemSize, items, view } = DTYPES[tensor.dtype];
  const like = view(new ArrayBuffer(0), 0, 0).constructor;
  if (column.data.constructor !== like && !(like === Uint8Array && column.data instanceof Uint8Array)) {
    throw new SpecMismatch(`tensor ${tensor.name}: found ${column.data.constructor.name}, expected ${like.name}`);
  }
  let shapes: Int32Array | null = null;
  let expected = (count * tensor.sampleBytes) / itemSize;
  if (tensor.isRagged) {
    shapes = column.shapes ?? null;
    if (shapes?.length !== count * tensor.wireNdim) {
      throw new SpecMismatch(`tensor ${tensor.name}: expected the shapes of ${count} samples`);
    }
    expected = elementsOf(shapes, count, tensor);
  }
  if (column.data.length !== expected * items) {
    throw new SpecMismatch(`tensor ${tensor.name}: found ${column.data.length} items, expected ${expected * items}`);
  }
  if (tensor.dtype === "bool" && (column.data as Uint8Array).some((value) => value > 1)) {
    throw new SpecMismatch(`tensor ${tensor.name}: found a byte above 1, expected 0 or 1`);
  }
  return { tensor, data: column.data, shapes };
}

function elementsOf(shapes: Int32Array, count: number, tensor: TensorSpec): number {
  try {
    inlineShapes(rows(shapes, count, tensor), count, tensor);
    return rowStarts(shapes, count, tensor)[count] as number;
  } catch (error) {
    throw new SpecMismatch((error as Error).message); // what a reader would refuse as a bad entry
  }
}

function rows(shapes: Int32Array, count: number, { wireNdim }: TensorSpec): number[][] {
  return Array.from({ length: count }, (_, at) => Array.from(shapes.subarray(at * wireNdim, (at + 1) * wireNdim)));
}

function bytesOf(data: TypedArray): Uint8Array {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

function refuseLarge(payload: readonly [string, Uint8Array][]): void {
  const largest = Math.max(...payload.map(([, value]) => value.byteLength));
  const total = payload.reduce((sum, [, value]) => sum + value.byteLength, 0);
  if (largest > MAX_FIELD_BYTES || total > MAX_ENTRY_BYTES) {
    throw new TooLarge(
      `an entry of ${total} bytes (largest tensor ${largest}) is over the limit of ${MAX_FIELD_BYTES} bytes a tensor ` +
        `and ${MAX_ENTRY_BYTES} an entry: write fewer or smaller samples at once`,
    );
  }
}
