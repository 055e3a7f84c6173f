// Replay: a retained epoch once more, without a group, in canonical order or shuffled, with its options, state and
// readahead.

import type { DatasetOf, TfLike } from "../adapters/tf.js";
import { type DatasetControls, type DatasetOptions, dataset } from "../adapters/tfjs.js";
import { type Batch, BatchBuilder, sampleBytes } from "../batch.js";
import { BadEntry, BadOption, StateMismatch } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { decodeWhole } from "../segments/decode.js";
import { SegmentReader } from "../segments/reader.js";
import { bytesOf, entriesOf, SERVER_OPTIONS, Server, type ServerOptions } from "../server/client.js";
import { ShuffleOrder, type ShuffleWindow } from "../shuffle/shuffle.js";
import { loadStream, partitionOf, requireSpec, type Stream } from "../stream/stream.js";
import { Outage } from "../waiting.js";
import { whole } from "../whole.js";
import { type Block, offsetsOf } from "../wire/codec.js";
import type { Spec } from "../wire/spec.js";
import { type PlacedRecord, RetainedEpoch } from "./retained.js";

const PREFETCH_BYTES = 64 * 2 ** 20;
/** The payload and the entries that are asked for ahead. More are asked for, in one packet, when half has come. */
const AHEAD_BYTES = 8 * 2 ** 20;
const AHEAD_ENTRIES = 64;
/** The records that are asked for ahead, so that the server has entries to send while it is asked for the next ones. */
const AHEAD_RECORDS = 256;
const LEASE_MS = 30_000;

/** How an epoch is replayed. */
export interface ReplayOptions extends ServerOptions {
  /** The number of the epoch. */
  readonly epoch: number;
  /** The samples of a batch. The last one may be smaller. */
  readonly batchSize: number;
  /** A seed. Blocks are read in a permuted order, and batches are drawn from a window, as Python's Replay does. */
  readonly shuffle?: number;
  /** The samples of the window. Default as many as `prefetchBytes` hold. */
  readonly window?: number;
  /** The bytes that a window without `window` holds. Default 64 MiB, as in Python. */
  readonly prefetchBytes?: number;
  /** The first pass. Only a shuffled pass depends on its number. Default 0. */
  readonly pass?: number;
  /** What `state()` returned: the first iteration goes on behind the batch that was delivered last. */
  readonly state?: ReplayState;
  /** The time that the epoch is kept without a renewal. Default 30,000. */
  readonly leaseMs?: number;
  /** Compare each payload with its checksum. Default true. */
  readonly checksum?: boolean;
}

const OPTIONS = {
  epoch: true,
  batchSize: true,
  shuffle: true,
  window: true,
  prefetchBytes: true,
  pass: true,
  state: true,
  leaseMs: true,
  checksum: true,
  ...SERVER_OPTIONS,
} satisfies OptionNames<ReplayOptions>;

/** Where a replay stands. It can be stored as JSON. */
export interface ReplayState {
  readonly v: 1;
  readonly stream: string;
  readonly epoch: number;
  readonly manifest: string;
  readonly batchSize: number;
  readonly shuffle: number | null;
  readonly window: number | null;
  readonly prefetchBytes: number;
  readonly pass: number;
  /** The batches of the pass that were delivered. */
  readonly batches: number;
}

/** What is replayed. */
export interface ReplayFacts {
  readonly spec: Spec;
  /** The samples in the epoch, without bad ones. */
  readonly samples: number;
  /** The batches of a pass. */
  readonly batches: number;
  /** The producer's facts about the stream, such as the names of classes. */
  readonly info: Record<string, unknown>;
}

/**
 * Replay a retained epoch once more, without a group, in canonical order or shuffled.
 *
 * @param stream The stream's name.
 * @returns The batches. Each iteration is a pass over the epoch.
 * @example
 * for await (const batch of replay("train", { epoch: 0, batchSize: 64 })) train(batch.tensors.x.data);
 */
export function replay(stream: string, options: ReplayOptions): Replay {
  return new Replay(stream, options);
}

interface Opened {
  readonly server: Server;
  /** The same server, which is waited for as long as the lease lasts. */
  readonly patient: Server;
  readonly stream: Stream;
  readonly spec: Spec;
  readonly retained: RetainedEpoch;
  readonly segments: SegmentReader | null;
}

/** The batches of one retained epoch. See `replay`. */
export class Replay implements AsyncIterable<Batch> {
  readonly #name: string;
  readonly #options: ReplayOptions;
  #opened: Promise<Opened> | null = null;
  #known: Opened | null = null;
  #pass: number;
  #skip: number;
  #handed: { pass: number; batches: number };

  constructor(stream: string, options: ReplayOptions) {
    checkOptions("replay", options, OPTIONS, "{ epoch: 0, batchSize: 64 }");
    const { epoch, batchSize, shuffle, window, state } = options;
    whole("epoch", epoch, 0);
    whole("batchSize", batchSize, 1);
    if (shuffle !== undefined) whole("shuffle", shuffle, 0);
    if (window !== undefined) whole("window", window, 1);
    if (window !== undefined && shuffle === undefined) throw new BadOption("window goes with shuffle, a seed");
    this.#name = stream;
    this.#options = options;
    this.#pass = state?.pass ?? whole("pass", options.pass ?? 0, 0);
    this.#skip = state?.batches ?? 0;
    this.#handed = { pass: this.#pass, batches: this.#skip };
  }

  /**
   * Connect and hold the epoch. The first iteration does the same.
   *
   * @throws StreamNotFound, EpochNotFound, EpochIncomplete, ReplayTruncated, StateMismatch or SegmentsUnseen.
   */
  async open(): Promise<ReplayFacts> {
    const { spec, retained, stream } = await this.#open();
    const { samples } = retained;
    return { spec, samples, batches: Math.ceil(samples / this.#options.batchSize), info: stream.info };
  }

  /** Return where the running pass stands: behind the batch that was delivered last. */
  state(): ReplayState {
    if (this.#known === null) throw new BadOption("a replay has no state before its first batch, or `open()`");
    return { ...this.#identity(this.#known), ...this.#handed };
  }

  /** Return the batches as a `tf.data.Dataset`, each iteration a pass. See `dataset`. */
  dataset<T extends TfLike>(tf: T, options: DatasetOptions): DatasetOf<T> & DatasetControls {
    return dataset(this, tf, options);
  }

  /** Release the epoch, and close the connection unless `client` was given. */
  async close(): Promise<void> {
    const opening = this.#opened;
    this.#opened = null;
    const opened = await opening?.catch(() => null); // whoever opened it has the error
    if (!opened) return;
    const { server, retained, segments } = opened;
    try {
      await retained.letGo();
    } finally {
      await segments?.close();
      server.close();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Yield the batches of the next pass. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Batch, void, void> {
    const opened = await this.#open();
    const [pass, skip] = [this.#pass, this.#skip];
    this.#pass += 1;
    this.#skip = 0;
    this.#handed = { pass, batches: skip };
    const { shuffle } = this.#options;
    const batches = shuffle === undefined ? this.#inOrder(opened, skip) : this.#shuffled(opened, shuffle, pass, skip);
    for await (const batch of batches) {
      opened.retained.raiseLost();
      this.#handed = { pass, batches: this.#handed.batches + 1 };
      yield batch;
    }
    this.#handed = { pass: pass + 1, batches: 0 };
  }

  #open(): Promise<Opened> {
    this.#opened ??= this.#connect();
    return this.#opened;
  }

  async #connect(): Promise<Opened> {
    const { epoch, leaseMs = LEASE_MS, state } = this.#options;
    const server = await Server.open(this.#options);
    let retained: RetainedEpoch | undefined;
    try {
      const stream = await loadStream(server, this.#name);
      const spec = requireSpec(stream);
      const segments = await SegmentReader.of(stream);
      retained = await RetainedEpoch.take(server, stream, epoch, leaseMs);
      const patient = server.patient(new Outage(() => {}, "replaying", leaseMs));
      const opened = { server, patient, stream, spec, retained, segments };
      this.#known = opened;
      if (state !== undefined) this.#require(state, opened);
      return opened;
    } catch (error) {
      await retained?.letGo();
      server.close();
      throw error;
    }
  }

  #identity({ stream, retained }: Opened): Omit<ReplayState, "pass" | "batches"> {
    const { epoch, batchSize, shuffle = null, window = null, prefetchBytes = PREFETCH_BYTES } = this.#options;
    return {
      v: 1,
      stream: stream.id,
      epoch,
      manifest: retained.manifest.id,
      batchSize,
      shuffle,
      window,
      prefetchBytes,
    };
  }

  #require(state: ReplayState, opened: Opened): void {
    for (const [name, value] of Object.entries(this.#identity(opened))) {
      const found = state[name as keyof ReplayState];
      if (found !== value) {
        throw new StateMismatch(`the state has ${name} ${found}, this replay has ${value}: give the options of then`);
      }
    }
    const most = Math.ceil(opened.retained.samples / this.#options.batchSize);
    if (!(state.batches >= 0 && state.batches <= most)) {
      throw new StateMismatch(`the state has ${state.batches} batches, a pass of this replay has ${most}`);
    }
  }

  async *#inOrder(opened: Opened, skip: number): AsyncGenerator<Batch> {
    const { spec, retained, patient } = opened;
    const { epoch, batchSize } = this.#options;
    let row = 0; // of the first block that is read
    const wanted = (async function* () {
      let handed = skip * batchSize;
      for await (const placed of readAhead(retained.records(patient), AHEAD_RECORDS)) {
        const { count } = placed.record;
        if (count > handed) {
          row += handed;
          yield placed;
        }
        handed = Math.max(0, handed - count);
      }
    })();
    let builder = new BatchBuilder(spec, epoch, batchSize);
    for await (const [{ shard }, { columns, header }] of this.#blocks(opened, wanted)) {
      const offsets = offsetsOf(header);
      while (row < offsets.length) {
        const end = Math.min(offsets.length, row + builder.room);
        builder.add(columns, shard, offsets, row, end);
        row = end;
        if (builder.room > 0) continue;
        yield builder.build();
        builder = new BatchBuilder(spec, epoch, batchSize);
      }
      row = 0;
    }
    if (builder.size > 0) yield builder.build();
  }

  async *#shuffled(opened: Opened, seed: number, pass: number, skip: number): AsyncGenerator<Batch> {
    const { spec, retained, patient } = opened;
    const { epoch, batchSize, prefetchBytes = PREFETCH_BYTES } = this.#options;
    const order = new ShuffleOrder(seed, pass, epoch);
    const held: PlacedRecord[] = [];
    for await (const placed of retained.records(patient)) if (placed.record.entryId !== "") held.push(placed);
    const records = order.blocks(held.length).map((place) => held[place] as PlacedRecord);
    const rowBytes = spec.reduce((sum, tensor) => sum + (tensor.isRagged ? 0 : tensor.sampleBytes), 0);
    const isFixed = spec.every(({ isRagged }) => !isRagged);
    const samples =
      this.#options.window ?? (isFixed ? Math.max(1, Math.floor(prefetchBytes / Math.max(1, rowBytes))) : null);
    const feed = new WindowFeed(order.window(batchSize, samples, prefetchBytes), batchSize);
    const gone = new Uint8Array(retained.samples); // 1 for a sample that was delivered before `state`
    let unread = skip;
    if (samples !== null && skip > 0) {
      for (const number of feed.rehearse(retained.samples, skip)) gone[number] = 1;
      unread = 0;
    }
    const kept = new Map<number, Row>();
    let first = 0;
    const numbered = records.map((placed) => {
      const numbers = { placed, first };
      first += placed.record.count;
      return numbers;
    });
    const wanted = numbered.filter(({ placed, first }) =>
      gone.subarray(first, first + placed.record.count).includes(0),
    );
    let at = 0;
    const give = function* (drawn: readonly number[][]): Generator<Batch> {
      for (const numbers of drawn) {
        const builder = new BatchBuilder(spec, epoch, numbers.length);
        for (const number of numbers) {
          const { block, shard, row, offset } = kept.get(number) as Row;
          builder.add(block, shard, offset, row, row + 1);
          kept.delete(number);
        }
        if (unread > 0) unread -= 1;
        else yield builder.build();
      }
    };
    const places = wanted.map(({ placed }) => placed);
    for await (const [{ shard }, { columns, header }] of this.#blocks(opened, places)) {
      const { first } = wanted[at] as (typeof wanted)[number];
      at += 1;
      const offsets = offsetsOf(header);
      for (let row = 0; row < offsets.length; row += 1) {
        if (samples === null) feed.measure(first + row, sampleBytes(columns, spec, row));
        if (!gone[first + row]) kept.set(first + row, copied(spec, epoch, columns, shard, offsets, row));
      }
      yield* give(feed.advance(wanted[at]?.first ?? retained.samples));
    }
    yield* give(feed.end(retained.samples));
  }

  /**
   * Yield entries in the order of their records. Several are asked for before they are needed.
   * A block is valid until the next one is asked for, because its memory is used again.
   */
  async *#blocks(
    opened: Opened,
    records: AsyncIterable<PlacedRecord> | Iterable<PlacedRecord>,
  ): AsyncGenerator<[PlacedRecord, Block]> {
    const asked: { placed: PlacedRecord; fetched: Promise<Fetched> }[] = [];
    let pending = 0;
    const next = async function* (): AsyncGenerator<[PlacedRecord, Block]> {
      const { placed, fetched } = asked.shift() as (typeof asked)[number];
      pending -= placed.record.bytes;
      const { block, values } = await fetched;
      yield [placed, block];
      opened.server.recycle(values);
    };
    for await (const placed of records) {
      if (placed.record.entryId === "") continue;
      const fetched = this.#fetch(opened, placed);
      fetched.catch(() => {}); // the error is raised where it is awaited
      asked.push({ placed, fetched });
      pending += placed.record.bytes;
      if (pending < AHEAD_BYTES && asked.length < AHEAD_ENTRIES) continue;
      while (asked.length > 1 && (pending > AHEAD_BYTES / 2 || asked.length > AHEAD_ENTRIES / 2)) yield* next();
    }
    while (asked.length > 0) yield* next();
  }

  async #fetch(
    { patient, stream, spec, retained, segments }: Opened,
    { shard, record }: PlacedRecord,
  ): Promise<Fetched> {
    const { epoch, checksum = true } = this.#options;
    const key = partitionOf(stream, shard).entries(epoch);
    const found = entriesOf(await patient.call("XRANGE", key, record.entryId, record.entryId));
    const entry = found[0];
    if (entry === undefined) throw await retained.truncated(record);
    const fields: [string, Uint8Array][] = [];
    for (let at = 0; at < entry[1].length; at += 2)
      fields.push([bytesOf(entry[1][at]).toString("latin1"), bytesOf(entry[1][at + 1])]);
    const block = await decodeWhole(fields, spec, segments, checksum);
    const { header } = block;
    if (
      header.stream !== stream.id ||
      header.epoch !== epoch ||
      header.shard !== shard ||
      header.first !== record.first ||
      header.end !== record.end ||
      header.count !== record.count
    ) {
      throw new BadEntry(
        `entry of shard ${header.shard} offsets ${header.first}-${header.end - 1} of stream ${header.stream}, where ` +
          `the index has shard ${shard} offsets ${record.first}-${record.end - 1}`,
      );
    }
    return { block, values: entry[1] };
  }
}

/** Yield the items of a source. As many as `most` are asked for before they are needed. */
async function* readAhead<T>(source: AsyncGenerator<T>, most: number): AsyncGenerator<T> {
  const asked: Promise<IteratorResult<T>>[] = [];
  try {
    for (;;) {
      while (asked.length < most) {
        const next = source.next();
        next.catch(() => {}); // the error is raised where it is awaited
        asked.push(next);
      }
      const { done, value } = await (asked.shift() as (typeof asked)[number]);
      if (done) return;
      yield value;
    }
  } finally {
    void source.return(undefined).catch(() => {});
  }
}

/** A block, and the values that were received for it. */
interface Fetched {
  readonly block: Block;
  readonly values: readonly Buffer[];
}

interface Row {
  readonly block: Block["columns"];
  readonly shard: number;
  readonly row: number;
  readonly offset: readonly number[];
}

/** Copy one row, so that a window does not keep whole entries alive. */
function copied(
  spec: Spec,
  epoch: number,
  columns: Block["columns"],
  shard: number,
  offsets: readonly number[],
  row: number,
): Row {
  const builder = new BatchBuilder(spec, epoch, 1);
  builder.add(columns, shard, offsets, row, row + 1);
  const { tensors } = builder.build();
  return { block: new Map(Object.entries(tensors)), shard, row: 0, offset: [offsets[row] as number] };
}

/** Gives samples to a window, a batch at a time as they come from the blocks, and takes what it draws. */
class WindowFeed {
  readonly #window: ShuffleWindow;
  readonly #batchSize: number;
  readonly #sizes = new Map<number, number>();
  #put = 0;

  constructor(window: ShuffleWindow, batchSize: number) {
    this.#window = window;
    this.#batchSize = batchSize;
  }

  /** Return the samples of the first `batches` batches, of `total` samples. No payload is needed. */
  rehearse(total: number, batches: number): number[] {
    const found: number[][] = [];
    while (found.length < batches) {
      const drawn = this.#window.take();
      if (drawn !== null) found.push(drawn);
      else if (this.#put < total) this.#putUpTo(Math.min(total, this.#put + this.#batchSize));
      else this.#window.end();
    }
    return found.flat();
  }

  /** Note the size of a sample, for a window in bytes. */
  measure(number: number, bytes: number): void {
    this.#sizes.set(number, bytes);
  }

  /** Note that all samples below a number were read, and return what is drawn now. */
  advance(known: number): number[][] {
    if (known < this.#put) return []; // what the window holds is not read again yet
    const found = this.#takeAll();
    while (this.#put + this.#batchSize <= known) {
      this.#putUpTo(this.#put + this.#batchSize);
      found.push(...this.#takeAll());
    }
    return found;
  }

  /** Return all that is left of `total` samples. */
  end(total: number): number[][] {
    const found = this.advance(total);
    this.#putUpTo(total);
    found.push(...this.#takeAll());
    this.#window.end();
    return [...found, ...this.#takeAll()];
  }

  #putUpTo(end: number): void {
    const numbers = Array.from({ length: end - this.#put }, (_, at) => this.#put + at);
    this.#window.put(
      numbers,
      numbers.map((number) => this.#sizes.get(number) ?? 0),
    );
    for (const number of numbers) this.#sizes.delete(number);
    this.#put = end;
  }

  #takeAll(): number[][] {
    const found: number[][] = [];
    for (let drawn = this.#window.take(); drawn !== null; drawn = this.#window.take()) found.push(drawn);
    return found;
  }
}
