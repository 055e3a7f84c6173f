// Blocks of one shard: the builder that gathers samples until a block is full, and blocks that are cut or moved to
// other offsets.

import { DTYPES, type TypedArray } from "../wire/dtypes.js";
import type { ColumnData } from "../wire/encode.js";
import { rowStarts } from "../wire/ragged.js";
import type { Spec, TensorSpec } from "../wire/spec.js";
import type { Rows } from "./rows.js";
import { checkNames, flattened, type SampleLike } from "./spec.js";
import { type Canonical, canonical } from "./values.js";

/** Samples of one shard whose offsets run from `first` to `end`, holes excepted. */
export class PackedBlock {
  readonly first: number;
  /** The number of samples. */
  readonly count: number;
  readonly spec: Spec;
  readonly columns: ReadonlyMap<string, ColumnData>;
  /** Offsets without a sample, ascending. */
  readonly holes: readonly number[];

  constructor(
    spec: Spec,
    first: number,
    count: number,
    columns: ReadonlyMap<string, ColumnData>,
    holes: readonly number[],
  ) {
    this.spec = spec;
    this.first = first;
    this.count = count;
    this.columns = columns;
    this.holes = holes;
  }

  get end(): number {
    return this.first + this.count + this.holes.length;
  }

  /** Return the payload bytes, without shapes. */
  get bytes(): number {
    let bytes = 0;
    for (const { data } of this.columns.values()) bytes += data.byteLength;
    return bytes;
  }

  /** Return the same samples at other offsets. */
  moved(first: number): PackedBlock {
    const holes = this.holes.map((hole) => hole - this.first + first);
    return new PackedBlock(this.spec, first, this.count, this.columns, holes);
  }

  /** Return the part before an offset. */
  head(offset: number): PackedBlock {
    const holes = this.holes.filter((hole) => hole < offset);
    const count = offset - this.first - holes.length;
    return new PackedBlock(this.spec, this.first, count, this.#rows(0, count), holes);
  }

  /** Return the part from an offset on. */
  tail(offset: number): PackedBlock {
    const before = this.holes.filter((hole) => hole < offset).length;
    const skip = offset - this.first - before;
    const count = this.count - skip;
    return new PackedBlock(this.spec, offset, count, this.#rows(skip, this.count), this.holes.slice(before));
  }

  #rows(start: number, stop: number): Map<string, ColumnData> {
    const columns = new Map<string, ColumnData>();
    for (const tensor of this.spec) {
      const column = this.columns.get(tensor.name) as ColumnData;
      columns.set(tensor.name, rowsOf(tensor, column, this.count, [start, stop]));
    }
    return columns;
  }
}

function rowsOf(tensor: TensorSpec, { data, shapes }: ColumnData, count: number, rows: [number, number]): ColumnData {
  if (shapes === null || shapes === undefined) {
    const [start, stop] = rows.map((row) => row * itemsOf(tensor));
    return { data: data.subarray(start, stop) };
  }
  const starts = rowStarts(shapes, count, tensor);
  const [start, stop] = rows.map((row) => (starts[row] as number) * DTYPES[tensor.dtype].items);
  const [from, to] = rows.map((row) => row * tensor.wireNdim);
  return { data: data.subarray(start, stop), shapes: shapes.subarray(from, to) };
}

/** Return the items of the typed array that one sample takes, of a tensor that is not ragged. */
export function itemsOf({ dtype, sampleBytes }: TensorSpec): number {
  const { itemSize, items } = DTYPES[dtype];
  return (sampleBytes / itemSize) * items;
}

/** A tensor of a fixed size. */
interface FixedTensor {
  readonly tensor: TensorSpec;
  /** The items of a typed array that one sample takes. */
  readonly items: number;
  /** Whether an array of the column's own type needs no further look. */
  readonly isExact: boolean;
}

/** Gathers samples until a block has its size. It copies values, so the caller may use its arrays again at once. */
export class BlockBuilder {
  /** The samples of a block of fixed-size tensors. Of ragged ones the bytes decide. */
  readonly #capacity: number;
  readonly #spec: Spec;
  readonly #targetBytes: number;
  readonly #fixed: readonly FixedTensor[];
  readonly #ragged: readonly TensorSpec[];
  readonly #fixedBytes: number;
  #columns: TypedArray[] = [];
  #parts: Canonical[][] = [];
  #partBytes = 0;
  #size = 0;

  /**
   * @param targetBytes The payload at which a block is full. A block holds at least one sample.
   * @param most The samples at which it is full.
   */
  constructor(spec: Spec, targetBytes: number, most: number) {
    this.#spec = spec;
    this.#targetBytes = targetBytes;
    this.#fixed = spec
      .filter(({ isRagged }) => !isRagged)
      .map((tensor) => ({
        tensor,
        items: itemsOf(tensor),
        isExact: tensor.shape.length > 0 && tensor.dtype !== "bool",
      }));
    this.#ragged = spec.filter(({ isRagged }) => isRagged);
    this.#fixedBytes = this.#fixed.reduce((sum, { tensor }) => sum + tensor.sampleBytes, 0);
    this.#capacity = Math.max(1, Math.min(most, Math.floor(targetBytes / Math.max(this.#fixedBytes, 1))));
  }

  get size(): number {
    return this.#size;
  }

  get isFull(): boolean {
    const bytes = this.#partBytes + this.#size * this.#fixedBytes;
    return this.#size >= this.#capacity || (this.#ragged.length > 0 && bytes >= this.#targetBytes);
  }

  /** Copy one sample into the block. Raises SpecMismatch or TooLarge, and changes nothing then. */
  add(sample: SampleLike): void {
    let values: Readonly<Record<string, unknown>> = sample;
    if (typeof sample !== "object" || sample === null || !this.#hasNames(sample)) {
      values = flattened(sample);
      checkNames(this.#spec, values);
    }
    this.#begin();
    const row = this.#size;
    const ragged = this.#ragged.map((tensor) => canonical(tensor, values[tensor.name]));
    this.#fixed.forEach(({ tensor, items, isExact }, at) => {
      const column = this.#columns[at] as TypedArray;
      const value = values[tensor.name];
      const isSame = isExact && (value as TypedArray)?.constructor === column.constructor;
      const data = isSame && (value as TypedArray).length === items ? value : canonical(tensor, value).data;
      column.set(data as never, row * items);
    });
    this.#keep(ragged);
    this.#size += 1;
  }

  #hasNames(sample: object): boolean {
    return (
      Object.keys(sample).length === this.#spec.length && this.#spec.every(({ name }) => Object.hasOwn(sample, name))
    );
  }

  /** Copy the rows [from, to) of `checkRows`, and return how many fitted. */
  addRows(rows: Rows, from: number, to: number): number {
    this.#begin();
    let taken = Math.min(to - from, this.#capacity - this.#size);
    if (this.#ragged.length > 0) taken = this.#addRagged(rows, from, taken);
    this.#fixed.forEach(({ items }, at) => {
      const source = rows.fixed[at] as TypedArray;
      const part = source.subarray(from * items, (from + taken) * items);
      (this.#columns[at] as TypedArray).set(part as never, this.#size * items);
    });
    this.#size += taken;
    return taken;
  }

  #addRagged(rows: Rows, from: number, most: number): number {
    for (let taken = 0; taken < most; taken += 1) {
      this.#keep(rows.ragged.map((values) => values[from + taken] as Canonical));
      const bytes = this.#partBytes + (this.#size + taken + 1) * this.#fixedBytes;
      if (bytes >= this.#targetBytes) return taken + 1;
    }
    return most;
  }

  /** Return the block gathered so far, and begin the next one. */
  finish(first: number, holes: readonly number[]): PackedBlock {
    const columns = new Map<string, ColumnData>();
    for (const tensor of this.#spec) {
      const at = this.#fixed.findIndex((one) => one.tensor === tensor);
      if (at < 0) columns.set(tensor.name, this.#joined(tensor));
      else columns.set(tensor.name, { data: this.#cut(at) });
    }
    const block = new PackedBlock(this.#spec, first, this.#size, columns, holes);
    this.#columns = [];
    this.#parts = [];
    this.#partBytes = this.#size = 0;
    return block;
  }

  #begin(): void {
    if (this.#columns.length > 0 || this.#parts.length > 0) return;
    this.#columns = this.#fixed.map(({ tensor, items }) => arrayOf(tensor, this.#capacity * items));
    this.#parts = this.#ragged.map(() => []);
  }

  #cut(at: number): TypedArray {
    const { tensor, items } = this.#fixed[at] as FixedTensor;
    return this.#columns[at]?.subarray(0, this.#size * items) ?? arrayOf(tensor, 0);
  }

  #keep(values: readonly Canonical[]): void {
    values.forEach(({ data, shape }, at) => {
      const copy = arrayOf(this.#ragged[at] as TensorSpec, data.length); // the slice of a Buffer is none
      copy.set(data as never);
      this.#parts[at]?.push({ data: copy, shape });
      this.#partBytes += data.byteLength + 8 * shape.length;
    });
  }

  #joined(tensor: TensorSpec): ColumnData {
    const parts = this.#parts[this.#ragged.indexOf(tensor)] ?? [];
    const joined = arrayOf(
      tensor,
      parts.reduce((sum, { data }) => sum + data.length, 0),
    );
    const shapes = new Int32Array(parts.length * tensor.wireNdim);
    let at = 0;
    parts.forEach(({ data, shape }, row) => {
      joined.set(data as never, at);
      at += data.length;
      shapes.set(shape, row * tensor.wireNdim);
    });
    return { data: joined, shapes };
  }
}

export function arrayOf({ dtype }: TensorSpec, length: number): TypedArray {
  const { itemSize, items, view } = DTYPES[dtype];
  return view(new ArrayBuffer((length * itemSize) / items), 0, length);
}
