// An epoch's index records by position: which blocks are committed, where each lies, and whether the order of shards is
// known yet.

import { EpochIncomplete, OrderNeedsSizes } from "../errors.js";
import type { Server } from "../server/client.js";
import type { BlockingConnection } from "../stream/blockingConnection.js";
import { type IndexRecord, recordsBehind } from "../stream/indexRecords.js";
import type { DeadNote } from "../stream/ledger.js";
import { begunShards, type Manifest } from "../stream/manifest.js";
import { startsOf } from "../stream/positions.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import type { IndexedPiece } from "./canonical.js";

/** A walk through an epoch's index in canonical order. It keeps what it has read until `forget`. */
export class IndexWalk {
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #dropped: readonly DeadNote[];
  #manifest: Manifest;
  #begun = 0;
  #starts: readonly number[] = [];
  /** What was read, in order of position. */
  readonly #pieces: IndexedPiece[] = [];
  /** The shard and the offset up to which the index was read. */
  #shard = 0;
  #offset = 0;

  /**
   * @param begun The number of shards that may have samples.
   * @param position Where the walk begins. All below it counts as committed.
   * @param dropped Ranges that an operator gave up. They count as holes.
   */
  constructor(
    server: Server,
    stream: Stream,
    manifest: Manifest,
    begun: number,
    position: number,
    dropped: readonly DeadNote[],
  ) {
    this.#server = server;
    this.#stream = stream;
    this.#dropped = [...dropped].sort((a, b) => a.first - b.first);
    this.#manifest = manifest;
    this.update(manifest, begun);
    // shards without samples are passed over
    this.#shard = Math.max(0, this.#starts.filter((start) => start <= position).length - 1);
    this.#offset = position - (this.#starts[this.#shard] ?? 0);
  }

  /** Take the current manifest, in which more shards may be complete. */
  update(manifest: Manifest, begun: number): void {
    this.#manifest = manifest;
    this.#begun = begun;
    this.#starts = startsOf(manifest, begun);
  }

  /** Return the position below which all, from the start of the walk, is known to be committed. */
  get end(): number {
    return (this.#starts[this.#shard] ?? 0) + this.#offset;
  }

  /** Read on until all below a position is known. Returns whether all below it is committed. */
  async reach(position: number): Promise<boolean> {
    while (this.end < position && (await this.#read()));
    return this.end >= position;
  }

  /** Return the end of all that is committed without a gap. */
  async toTheEnd(): Promise<number> {
    await this.reach(Number.POSITIVE_INFINITY);
    return this.end;
  }

  /** Wait until more is committed, if possible all below a position. Returns whether there is any news. */
  async wait(connection: BlockingConnection, blockMs: number, position: number): Promise<boolean> {
    this.#goOn();
    const { end } = this;
    // one wait for many records: only the last one that is needed in this shard ends it
    const needed = position - (this.#starts[this.#shard] ?? 0) - 1;
    const last = (this.#size(this.#shard) ?? Number.POSITIVE_INFINITY) - 1;
    const after = Math.max(this.#offset, Math.min(needed, last));
    const key = partitionOf(this.#stream, this.#shard).index(this.#manifest.epoch, this.#shard);
    await connection.call(blockMs, ["XREAD", "COUNT", 1], ["STREAMS", key, `${after}-0`]);
    await this.reach(position);
    return this.end > end;
  }

  /** Return what comes next, in words. */
  where(): string {
    const size = this.#size(this.#shard);
    return `shard ${this.#shard} from offset ${this.#offset}${size === null ? "" : ` of ${size}`}`;
  }

  /** Yield the pieces from the one that holds `lo` to the first uncommitted position or the epoch's end. */
  async *pieces(lo: number): AsyncGenerator<IndexedPiece> {
    for (let at = lo; ; ) {
      if (!(await this.reach(at + 1))) return;
      const piece = this.#pieces.find(({ start, end }) => start <= at && at < end);
      if (piece === undefined) return;
      yield piece;
      at = piece.end;
    }
  }

  /** Forget the pieces that end at or before `below`, which are not needed any more. */
  forget(below: number): void {
    const kept = this.#pieces.findIndex(({ end }) => end > below);
    this.#pieces.splice(0, kept < 0 ? this.#pieces.length : kept);
  }

  /** Continue with the next shard behind a complete one. */
  #goOn(): void {
    for (let size = this.#size(this.#shard); size !== null && this.#offset >= size; size = this.#size(this.#shard)) {
      if (this.#shard + 1 >= Math.min(this.#begun, this.#starts.length)) return;
      this.#shard += 1;
      this.#offset -= size;
    }
  }

  #size(shard: number): number | null {
    const { sizes, done } = this.#manifest;
    return (sizes === null ? done.get(shard) : sizes[shard]) ?? null;
  }

  /** Read a page of records. Returns whether more is known now. */
  async #read(): Promise<boolean> {
    this.#goOn();
    const [shard, before, size] = [this.#shard, this.#offset, this.#size(this.#shard)];
    if (this.#starts.length === 0 || (size !== null && before >= size)) return false;
    const partition = partitionOf(this.#stream, shard);
    const page = await recordsBehind(this.#server, partition, this.#manifest.epoch, shard, before);
    for (const record of page) {
      if (record.first > this.#offset) this.#pass(record.first);
      this.#add(record);
    }
    if (page.length === 0 && size !== null && this.#manifest.state === "produced") this.#pass(size);
    return this.#offset > before;
  }

  /** Keep a record. It replaces what was known of its positions, because a repair overrides. */
  #add(record: IndexRecord): void {
    const from = this.#starts[this.#shard] as number;
    const [start, end] = [from + record.first, from + record.end];
    while ((this.#pieces.at(-1)?.end ?? 0) > start) this.#pieces.pop();
    this.#pieces.push({ start, end, shard: this.#shard, record });
    this.#offset = record.end;
  }

  /** Take what no record names, up to `end`, for holes, if an operator gave it up. Raises EpochIncomplete. */
  #pass(end: number): void {
    let at = this.#offset;
    for (const note of this.#dropped) {
      if (note.shard === this.#shard && note.first <= at) at = Math.max(at, note.end);
    }
    if (at < end) {
      const { name } = this.#stream;
      const { epoch } = this.#manifest;
      throw new EpochIncomplete(
        `epoch ${epoch} of '${name}': the index of shard ${this.#shard} has no record of offsets ` +
          `${this.#offset}-${end - 1}: \`penstock audit ${name} --repair SOURCE...\` makes them again, ` +
          `\`penstock bad drop ${name} ${epoch} --group GROUP\` goes on without`,
      );
    }
    this.#add({ end, entryId: "", first: this.#offset, count: 0, bytes: 0, holes: [], writer: "" });
  }
}

/**
 * Return the number of shards that may have samples.
 *
 * While an epoch has no sizes, each shard begins where the one before it ended: only the last may be unfinished.
 *
 * @throws OrderNeedsSizes where shards have no order yet.
 */
export async function shardsInOrder(server: Server, stream: Stream, manifest: Manifest): Promise<number> {
  const begun = await begunShards(server, stream, manifest);
  if (manifest.sizes === null && begun > startsOf(manifest, begun).length) {
    throw new OrderNeedsSizes(
      `epoch ${manifest.epoch} of '${stream.name}' is written in ${begun} shards at once and has no sizes: their order ` +
        "is not known. Plan it (`penstock produce`, or Writer.epoch(sizes=...)), write it with one writer, or read it " +
        "without rank and worldSize",
    );
  }
  return begun;
}
