// Batches: the `Batch` that a loop gets, its memory, which `release` gives back, and the builder that copies rows into
// it.

import { PenstockError } from "./errors.js";
import { SpareMemory } from "./spareMemory.js";
import { Column } from "./wire/codec.js";
import { typed } from "./wire/dtypes.js";
import { rowStarts } from "./wire/ragged.js";
import type { Spec, TensorSpec } from "./wire/spec.js";

/** The most memory of released batches that is kept. */
const SPARE_BYTES = 64 * 2 ** 20;
const spare = new SpareMemory(SPARE_BYTES);
/** Node can leave out the zeros. */
const allocate =
  typeof Buffer === "undefined"
    ? (bytes: number) => new Uint8Array(bytes)
    : (bytes: number) => Buffer.allocUnsafeSlow(bytes);

/** The identity of a sample, which names it for as long as the stream exists. */
export type Identity = readonly [epoch: number, shard: number, offset: number];

/** Consecutive rows of a batch at the offsets [lo, hi) of one shard, from one entry. */
export interface Span {
  readonly shard: number;
  readonly lo: number;
  readonly hi: number;
}

/** Return the error of a batch that is acknowledged behind the end of its loader. */
export function closedBefore(stream: string, samples: number): PenstockError {
  return new PenstockError(
    `this loader of '${stream}' was closed before ${samples} samples were acknowledged: the group hands them out again`,
  );
}

/** Samples of one epoch. `batch.tensors.x.data` has all samples of x in one typed array. */
export class Batch {
  /** The number of the epoch. */
  readonly epoch: number;
  /** The number of samples. */
  readonly size: number;
  /** Tensor name to its samples. */
  readonly tensors: Readonly<Record<string, Column>>;
  /** The shards and offsets of the rows, in order. */
  readonly spans: readonly Span[];

  constructor(epoch: number, size: number, tensors: Readonly<Record<string, Column>>, spans: readonly Span[]) {
    this.epoch = epoch;
    this.size = size;
    this.tensors = tensors;
    this.spans = spans;
  }

  /** Yield the identity of each row. */
  *identities(): Generator<Identity> {
    for (const { shard, lo, hi } of this.spans) {
      for (let offset = lo; offset < hi; offset += 1) yield [this.epoch, shard, offset];
    }
  }

  /**
   * Give the memory of this batch to later ones, which saves page faults and garbage collections.
   * Its arrays, and all views of them, are empty from now on. TF.js may keep a view: release behind its last use.
   */
  release(): void {
    for (const { data, shapes } of Object.values(this.tensors)) {
      if (data.byteLength === 0) continue; // released, or transferred to a worker
      const memory = data.buffer as ArrayBuffer;
      const moved = structuredClone(memory, { transfer: [memory] });
      if (shapes === null) spare.keep(moved);
    }
  }
}

/** Rows of columns, copied one after the other into the tensors of one batch. */
export class BatchBuilder {
  readonly #epoch: number;
  readonly #spec: Spec;
  readonly #capacity: number;
  readonly #stores: readonly Store[];
  readonly #spans: { shard: number; lo: number; hi: number }[] = [];
  #size = 0;

  /**
   * @param spec The stream's spec.
   * @param epoch The epoch of all rows.
   * @param capacity The rows that memory is taken for.
   */
  constructor(spec: Spec, epoch: number, capacity: number) {
    this.#epoch = epoch;
    this.#spec = spec;
    this.#capacity = capacity;
    this.#stores = spec.map((tensor) => (tensor.isRagged ? new RaggedStore(tensor) : new FixedStore(tensor, capacity)));
  }

  /** Return the rows that are still free. */
  get room(): number {
    return this.#capacity - this.#size;
  }

  get size(): number {
    return this.#size;
  }

  /**
   * Add the rows [from, to) of an entry.
   *
   * @param columns The entry's columns, by name.
   * @param shard The entry's shard.
   * @param offsets The offset of each of the entry's rows.
   */
  add(columns: ReadonlyMap<string, Column>, shard: number, offsets: readonly number[], from: number, to: number): void {
    this.#spec.forEach(({ name }, at) => {
      (this.#stores[at] as Store).add(columns.get(name) as Column, from, to, this.#size);
    });
    for (let row = from; row < to; row += 1) {
      const offset = offsets[row] as number;
      const last = this.#spans.at(-1);
      if (last !== undefined && last.shard === shard && last.hi === offset) last.hi += 1;
      else this.#spans.push({ shard, lo: offset, hi: offset + 1 });
    }
    this.#size += to - from;
  }

  /** Return the batch. */
  build(): Batch {
    const tensors: Record<string, Column> = Object.create(null);
    this.#spec.forEach(({ name }, at) => {
      tensors[name] = (this.#stores[at] as Store).column(this.#size);
    });
    return new Batch(this.#epoch, this.#size, tensors, this.#spans);
  }
}

interface Store {
  add(column: Column, from: number, to: number, at: number): void;
  column(size: number): Column;
}

class FixedStore implements Store {
  readonly #tensor: TensorSpec;
  readonly #data: Uint8Array;

  constructor(tensor: TensorSpec, capacity: number) {
    this.#tensor = tensor;
    const bytes = capacity * tensor.sampleBytes;
    const memory = spare.take(bytes);
    this.#data = memory === undefined ? allocate(bytes) : new Uint8Array(memory);
  }

  add({ data }: Column, from: number, to: number, at: number): void {
    const row = this.#tensor.sampleBytes;
    this.#data.set(new Uint8Array(data.buffer, data.byteOffset + from * row, (to - from) * row), at * row);
  }

  column(size: number): Column {
    const data = typed(this.#tensor.dtype, this.#data.subarray(0, size * this.#tensor.sampleBytes));
    return new Column(this.#tensor, data, null, null);
  }
}

class RaggedStore implements Store {
  readonly #tensor: TensorSpec;
  readonly #pieces: Uint8Array[] = [];
  readonly #shapes: Int32Array[] = [];

  constructor(tensor: TensorSpec) {
    this.#tensor = tensor;
  }

  add(column: Column, from: number, to: number): void {
    const ndim = this.#tensor.wireNdim;
    for (let row = from; row < to; row += 1) {
      const { data } = column.sample(row);
      // a copy, so that a batch that is under way does not keep the whole entry alive
      this.#pieces.push(new Uint8Array(data.buffer, data.byteOffset, data.byteLength).slice());
    }
    this.#shapes.push((column.shapes as Int32Array).slice(from * ndim, to * ndim));
  }

  column(size: number): Column {
    const { dtype, wireNdim } = this.#tensor;
    const shapes = new Int32Array(size * wireNdim);
    let done = 0;
    for (const piece of this.#shapes) {
      shapes.set(piece, done);
      done += piece.length;
    }
    const bytes = new Uint8Array(new ArrayBuffer(this.#pieces.reduce((sum, { length }) => sum + length, 0)));
    let at = 0;
    for (const piece of this.#pieces) {
      bytes.set(piece, at);
      at += piece.length;
    }
    return new Column(this.#tensor, typed(dtype, bytes), shapes, rowStarts(shapes, size, this.#tensor));
  }
}

/** Return the bytes of one sample as a window counts them: of a ragged tensor also those of its shape. */
export function sampleBytes(columns: ReadonlyMap<string, Column>, spec: Spec, row: number): number {
  let bytes = 0;
  for (const tensor of spec) {
    if (!tensor.isRagged) bytes += tensor.sampleBytes;
    else bytes += (columns.get(tensor.name) as Column).sample(row).data.byteLength + 8 * tensor.wireNdim;
  }
  return bytes;
}
