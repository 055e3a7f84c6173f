// Decodes entries: the fields of an entry to the samples of a block, with checksum and sizes checked.
// docs/wire-format.md defines them, and `encode.ts` encodes.

import { BadEntry, ChecksumMismatch } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { digestOf } from "./checksum.js";
import { DTYPES, type TypedArray, typed } from "./dtypes.js";
import { type Header, parseHeader } from "./header.js";
import { MAX_ENTRY_BYTES } from "./limits.js";
import { readShapes, rowStarts } from "./ragged.js";
import { META, SHAPES_SUFFIX, type Spec, type TensorSpec } from "./spec.js";
import { unpackZstd } from "./zstd.js";

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

const OPTIONS = { checksum: true, takesRefs: true } satisfies OptionNames<DecodeOptions>;

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
  checkOptions("decode", options, OPTIONS);
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
  const layouts = spec.map((tensor) => layoutOf(header, tensor, values));
  if (header.compressed.size > 0) unpack(header, layouts, values);
  return { header, columns: new Map(layouts.map((layout) => [layout.tensor.name, columnOf(layout, values)])) };
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

/** What a tensor's values are, by the header and the field of shapes. */
interface Layout {
  readonly tensor: TensorSpec;
  readonly bytes: number;
  readonly shapes: Int32Array | null;
  readonly starts: Float64Array | null;
}

function layoutOf(header: Header, tensor: TensorSpec, values: ReadonlyMap<string, Uint8Array>): Layout {
  if (!tensor.isRagged) return { tensor, bytes: header.count * tensor.sampleBytes, shapes: null, starts: null };
  const field = values.get(tensor.name + SHAPES_SUFFIX) as Uint8Array;
  const shapes = header.shapes.get(tensor.name) ?? readShapes(field, header.count, tensor);
  const starts = rowStarts(shapes, header.count, tensor);
  return { tensor, bytes: (starts[header.count] as number) * DTYPES[tensor.dtype].itemSize, shapes, starts };
}

/** Replace frames by what they hold, once the sum of all sizes is bounded. */
function unpack(header: Header, layouts: readonly Layout[], values: Map<string, Uint8Array>): void {
  const total = layouts.reduce((sum, { bytes }) => sum + bytes, 0);
  if (total > MAX_ENTRY_BYTES) throw new BadEntry(`an entry of ${total} bytes, at most ${MAX_ENTRY_BYTES} are read`);
  for (const { tensor, bytes } of layouts) {
    if (!header.compressed.has(tensor.name)) continue;
    values.set(tensor.name, unpackZstd(tensor.name, values.get(tensor.name) as Uint8Array, bytes));
  }
}

function columnOf({ tensor, bytes, shapes, starts }: Layout, values: ReadonlyMap<string, Uint8Array>): Column {
  const data = values.get(tensor.name) as Uint8Array;
  if (data.byteLength !== bytes) {
    throw new BadEntry(`tensor ${tensor.name} has ${data.byteLength} bytes, expected ${bytes}`);
  }
  if (tensor.dtype === "bool" && data.some((value) => value > 1)) {
    throw new BadEntry(`tensor ${tensor.name} is bool and has a byte other than 0 and 1`);
  }
  return new Column(tensor, typed(tensor.dtype, data), shapes, starts);
}
