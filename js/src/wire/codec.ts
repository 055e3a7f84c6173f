import { BadEntry, ChecksumMismatch } from "../errors.js";
import { digestOf } from "./checksum.js";
import { DTYPES, type TypedArray, typed } from "./dtypes.js";
import { type Header, parseHeader } from "./header.js";
import { readShapes, rowStarts } from "./ragged.js";
import { META, SHAPES_SUFFIX, type Spec, type TensorSpec } from "./spec.js";

/** A name beyond it is no tensor's: 128 letters, and `.shapes`. */
const LONGEST_NAME = 136;

/** The fields of an entry as they come from the server: names and values, in order. */
export type Fields = readonly (readonly [name: Uint8Array | string, value: Uint8Array])[];

/** One sample of a tensor. */
export interface Sample {
  readonly shape: readonly number[];
  /** A view of the block's data. */
  readonly data: TypedArray;
}

/** One tensor of a block: all samples in one typed array. */
export class Column {
  /** The tensor's name, dtype and shape of a sample. */
  readonly spec: TensorSpec;
  /** The elements of all samples in order, each sample in C order. */
  readonly data: TypedArray;
  /** Of a ragged tensor: the shapes of its samples, n * ndim sizes. Otherwise null. */
  readonly shapes: Int32Array | null;
  readonly #starts: Float64Array | null;

  constructor(spec: TensorSpec, data: TypedArray, shapes: Int32Array | null, starts: Float64Array | null) {
    this.spec = spec;
    this.data = data;
    this.shapes = shapes;
    this.#starts = starts;
  }

  /**
   * Return a sample.
   *
   * @param index Counted from 0. `offsetsOf` has its offset in the shard.
   */
  sample(index: number): Sample {
    const { itemSize, items } = DTYPES[this.spec.dtype];
    if (this.shapes === null || this.#starts === null) {
      const size = (this.spec.sampleBytes / itemSize) * items;
      return { shape: this.spec.shape as number[], data: this.data.subarray(index * size, (index + 1) * size) };
    }
    const [start, stop] = [this.#starts[index] as number, this.#starts[index + 1] as number];
    const ndim = this.spec.wireNdim;
    return {
      shape: Array.from(this.shapes.subarray(index * ndim, (index + 1) * ndim)),
      data: this.data.subarray(start * items, stop * items),
    };
  }
}

/** The decoded samples of one entry. */
export interface Block {
  readonly header: Header;
  /** Tensor name to its samples, in wire order. */
  readonly columns: ReadonlyMap<string, Column>;
}

/** How an entry is decoded. */
export interface DecodeOptions {
  /** Compare the payload with the checksum of the header. Default true. */
  readonly checksum?: boolean;
  /** Accept a header whose payload is in a segment file. Default false. */
  readonly takesRefs?: boolean;
}

/**
 * Decode one entry. Aligned payloads become views of the given buffers, others are copied.
 *
 * @param fields The entry's fields in the order read.
 * @param spec The stream's spec.
 * @throws BadEntry unless this is exactly an entry of this spec. A subclass says more.
 * @example
 * const block = decode(fields, parseSpec('{"x": ["float32", [2]]}'));
 * block.columns.get("x").sample(0).data; // a Float32Array
 */
export function decode(fields: Fields, spec: Spec, options: DecodeOptions = {}): Block {
  const named = fields.map(([name, value]) => [nameOf(name), value] as const);
  const meta = named[0];
  if (meta?.[0] !== META) throw new BadEntry("the first field is not 'meta'");
  const header = parseHeader(meta[1], spec, options);
  const payload = named.slice(1);
  const isExpected = (name: string, index: number) => name === header.fields[index]?.name;
  if (payload.length !== header.fields.length || !payload.every(([name], index) => isExpected(name, index))) {
    throw new BadEntry(
      `${payload.length} payload fields, expected ${header.fields
        .map(({ name }) => name)
        .join(", ")
        .slice(0, 200)}`,
    );
  }
  if (options.checksum !== false && header.xxh3 !== null) {
    const found = digestOf(payload.map(([, value]) => value));
    if (found !== header.xxh3) throw new ChecksumMismatch(`payload has xxh3 ${found}, its header says ${header.xxh3}`);
  }
  const values = new Map(payload);
  return { header, columns: new Map(spec.map((tensor) => [tensor.name, columnOf(header, tensor, values)])) };
}

/**
 * Return the offset in the shard of each sample of a block.
 *
 * @param header The block's header.
 */
export function offsetsOf(header: Header): number[] {
  const holes = new Set(header.holes);
  const offsets: number[] = [];
  for (let offset = header.first; offset < header.end; offset += 1) if (!holes.has(offset)) offsets.push(offset);
  return offsets;
}

function nameOf(name: Uint8Array | string): string {
  return typeof name === "string" ? name : String.fromCharCode(...name.subarray(0, LONGEST_NAME));
}

function columnOf(header: Header, tensor: TensorSpec, values: ReadonlyMap<string, Uint8Array>): Column {
  const data = values.get(tensor.name) as Uint8Array;
  let shapes: Int32Array | null = null;
  let starts: Float64Array | null = null;
  let expected = header.count * tensor.sampleBytes;
  if (tensor.isRagged) {
    const field = values.get(tensor.name + SHAPES_SUFFIX) as Uint8Array;
    shapes = header.shapes.get(tensor.name) ?? readShapes(field, header.count, tensor);
    starts = rowStarts(shapes, header.count, tensor);
    expected = (starts[header.count] as number) * DTYPES[tensor.dtype].itemSize;
  }
  if (data.byteLength !== expected) {
    throw new BadEntry(`tensor ${tensor.name} has ${data.byteLength} bytes, expected ${expected}`);
  }
  if (tensor.dtype === "bool" && data.some((value) => value > 1)) {
    throw new BadEntry(`tensor ${tensor.name} is bool and has a byte other than 0 and 1`);
  }
  return new Column(tensor, typed(tensor.dtype, data), shapes, starts);
}
