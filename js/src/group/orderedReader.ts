// The reader of one epoch in canonical order for one rank: it plans steps by the shard indexes, and fetches entries
// into batches.

import {
  BadEntry,
  EpochIncomplete,
  EpochNotFound,
  SegmentGone,
  SegmentsUnseen,
  TooLarge,
  UnsupportedVersion,
} from "../errors.js";
import { entriesOf, type StreamEntry } from "../server/client.js";
import type { BlockingConnection } from "../stream/blockingConnection.js";
import { isIndexed } from "../stream/indexRecords.js";
import type { PartitionKeys } from "../stream/keys.js";
import { bury, type DeadNote, deadNotes } from "../stream/ledger.js";
import { isEnded, loadManifest, type Manifest, plannedSamples, renewed } from "../stream/manifest.js";
import { HEAD_STEPS } from "../stream/positions.js";
import { loadRoster, type Order } from "../stream/roster.js";
import { partitionOf, requireThere, type Stream } from "../stream/stream.js";
import { type Notify, seconds } from "../waiting.js";
import type { Block } from "../wire/codec.js";
import type { Header } from "../wire/header.js";
import { Assembler } from "./batch.js";
import { EpochSteps, type IndexedPiece, isWhole, joined, NoGoodSample, type RowRange, resolve } from "./canonical.js";
import { notReadHere } from "./deadLetters.js";
import type { Heartbeats } from "./heartbeat.js";
import { IndexWalk, shardsInOrder } from "./indexWalk.js";
import { Lease } from "./leases.js";
import type { Remainder } from "./options.js";
import { type PrefetchQueue, QueueStopped } from "./queue.js";
import type { RankMember } from "./rankMember.js";
import { checkIdentity, decodeChecked, fieldsOf, type ReceiveOptions } from "./receive.js";
import { whetherProducerRuns, whyNoRoom } from "./sentences.js";

/** The payload that is asked for before the first of it arrives, which hides round trips. */
const AHEAD_BYTES = 4_000_000;
const AHEAD_ENTRIES = 32;
/** The fetches that are planned at once. */
const PLANNED = 64;
const ROOM_MS = 200;
/** A wait for the next block, which is finite because an epoch may end without one; and a wait for the end alone. */
const BLOCK_MS = 100;
const END_MS = 10;
/** The share of a budget that is reserved for what readers wait for. */
const RESERVED_SHARE = 0.25;

/** What a reader of a rank is made of. */
export interface RankReaderParts {
  readonly member: RankMember;
  readonly heartbeat: Heartbeats;
  readonly connection: BlockingConnection;
  readonly receive: ReceiveOptions;
  readonly remainder: Remainder;
  readonly notify: Notify;
}

/** The next positions are not committed yet. */
class NotCommittedYet extends Error {}

interface Asked {
  readonly range: RowRange;
  readonly answer: Promise<StreamEntry | null>;
}

/** What an ordered group skips: entries that are dead letters or given up, and ranges without an entry. */
interface Skipped {
  /** `partition:id` of each entry. */
  readonly entries: ReadonlySet<string>;
  readonly ranges: readonly DeadNote[];
}

/** Reads one epoch in canonical order for one rank, by the shard indexes, into a prefetch queue. */
export class OrderedReader {
  readonly epoch: number;
  /** A notice, if a server lost the epoch as a whole, else "". */
  loss = "";
  readonly #made: RankReaderParts;
  readonly #queue: PrefetchQueue;
  readonly #steps: EpochSteps;
  readonly #assembler: Assembler;
  readonly #unusable: Set<string>;
  #dropped: readonly DeadNote[];
  #manifest: Manifest;
  #walk: IndexWalk;
  /** A walk from the first position of the epoch, for what runs on beyond its end. */
  #head: IndexWalk | null = null;
  /** The rows planned, the rows received, and the batches put into the queue. */
  #planned = 0;
  #received = 0;
  #emitted = 0;
  #todo: RowRange[] = [];
  #asked: Asked[] = [];
  /** Whether the last look for more found less than the next step needs. */
  #isDry = false;
  /** The end of an abandoned epoch. */
  #brokenOff: number | null = null;

  private constructor(
    made: RankReaderParts,
    manifest: Manifest,
    queue: PrefetchQueue,
    steps: EpochSteps,
    walk: IndexWalk,
    skipped: Skipped,
  ) {
    this.#made = made;
    this.epoch = manifest.epoch;
    this.#manifest = manifest;
    this.#queue = queue;
    this.#steps = steps;
    this.#walk = walk;
    this.#unusable = new Set(skipped.entries);
    this.#dropped = skipped.ranges;
    this.#assembler = new Assembler(made.receive.spec, this.epoch, steps.batch);
  }

  /**
   * Begin at a position of an epoch.
   *
   * @throws OrderNeedsSizes or TooLarge.
   */
  static async open(
    made: RankReaderParts,
    manifest: Manifest,
    start: number,
    queue: PrefetchQueue,
  ): Promise<OrderedReader> {
    const { member, remainder } = made;
    const { server, stream, order } = member;
    requireStepFits(stream, made.receive, order);
    const begun = await shardsInOrder(server, stream, manifest);
    const skipped = await skippedBy(member, manifest.epoch);
    const walk = new IndexWalk(server, stream, manifest, begun, start, skipped.ranges);
    member.begins(manifest.epoch, start);
    const steps = new EpochSteps(start, order, remainder);
    const reader = new OrderedReader(made, manifest, queue, steps, walk, skipped);
    await reader.#refresh(manifest);
    return reader;
  }

  /** Read to the end. Everything ends in the queue, errors too. */
  async run(): Promise<void> {
    try {
      await this.#read();
      this.#queue.end();
    } catch (error) {
      if (error instanceof QueueStopped) this.#queue.end();
      else if (error instanceof EpochNotFound) await this.#endReleased(error);
      else this.#queue.end(await this.#causeOf(error as Error));
    }
  }

  /** Return this error, or the one that took the whole stream along. */
  async #causeOf(error: Error): Promise<Error> {
    if (!(error instanceof SegmentsUnseen)) return error;
    const { server, stream } = this.#made.member;
    return await requireThere(server, stream).then(
      () => error,
      (worse) => worse,
    );
  }

  /** Return why there is no batch, in words for the training loop's user. */
  async whyWaiting(ms: number): Promise<string> {
    const { impatient, stream } = this.#made.member;
    const { name } = stream;
    const total = this.#total;
    if (total !== null && this.#isPlannedOut(total)) {
      return (
        `the word that epoch ${this.epoch} of '${name}' is complete: all ${total} samples are there, but its producer ` +
        `has not said so. If it died: \`penstock epochs close ${name} ${this.epoch}\``
      );
    }
    const where = `${this.#walk.where()} of epoch ${this.epoch} of '${name}'`;
    const full = await whyNoRoom(impatient, stream);
    if (full !== "") return `${where}; none came for ${seconds(ms)} s: ${full}`;
    const step = Math.floor(this.#planned / this.#steps.batch);
    return (
      `${where}, which is next in order (step ${step} ends at position ${this.#steps.endOf(step)}); none came for ` +
      `${seconds(ms)} s. ${whetherProducerRuns(name, this.epoch, ms)}`
    );
  }

  /** Return whether no step begins at this position or beyond. */
  isLast(position: number): boolean {
    const total = this.#total;
    return total !== null && position >= this.#steps.endOf(this.#steps.count(total) - 1);
  }

  // --- the loop ---

  async #read(): Promise<void> {
    const { heartbeat, member } = this.#made;
    do
      heartbeat.raiseError(); // nothing may be delivered under a name that another process took
    while (!(await this.#turn()));
    this.#assembler.flush();
    this.#emit();
    member.ended(this.epoch, this.#steps.endOf(this.#emitted - 1), this.#total ?? 0);
  }

  /** Do one round. Returns whether the epoch is read to its end. */
  async #turn(): Promise<boolean> {
    await this.#plan();
    await this.#ask();
    if (this.#asked.length > 0) await this.#takeAnswer();
    else if (this.#todo.length > 0) await this.#queue.room(0, ROOM_MS);
    else if (this.#isOver()) return true;
    else await this.#awaitMore();
    return false;
  }

  /** Whether the epoch ended without a sample. */
  get isEmpty(): boolean {
    return this.#total === 0;
  }

  /** Return the positions in the epoch, as far as they are known. */
  get #total(): number | null {
    return this.#brokenOff ?? plannedSamples(this.#manifest);
  }

  /** Return whether everything is planned. A producer that has not closed its epoch is waited for. */
  #isOver(): boolean {
    const total = this.#total;
    return total !== null && isEnded(this.#manifest) && this.#isPlannedOut(total);
  }

  #isPlannedOut(total: number): boolean {
    const [step, done] = this.#place;
    const [lo, hi] = this.#steps.mine(step, total);
    return step >= this.#steps.count(total) || done >= hi - lo; // a smaller last batch, with 'keep'
  }

  /** The step that is planned next, and how many of its rows are planned. */
  get #place(): [step: number, done: number] {
    const { batch } = this.#steps;
    return [Math.floor(this.#planned / batch), this.#planned % batch];
  }

  async #awaitMore(): Promise<void> {
    const { member, connection } = this.#made;
    await this.#queue.room(0, 0); // raises QueueStopped
    this.#isDry = false;
    const total = this.#total;
    const blockMs = total !== null && this.#isPlannedOut(total) ? END_MS : BLOCK_MS;
    const needed = this.#steps.needed(this.#place[0], total);
    if (await member.patiently(() => this.#walk.wait(connection, blockMs, needed))) return;
    await this.#refresh(await renewed(member.server, member.stream, this.#manifest));
  }

  async #refresh(manifest: Manifest): Promise<void> {
    const { server, stream } = this.#made.member;
    this.#manifest = manifest;
    const begun = await shardsInOrder(server, stream, manifest);
    this.#walk.update(manifest, begun);
    this.#head?.update(manifest, begun);
    // an abandoned epoch ends with what is there
    if (manifest.state === "abandoned") this.#brokenOff ??= await this.#walk.toTheEnd();
  }

  // --- planning ---

  /** Plan steps that are committed, as long as few fetches are planned. */
  async #plan(): Promise<void> {
    while (this.#todo.length + this.#asked.length < PLANNED) {
      const [step, done] = this.#place;
      const total = this.#total;
      if ((total !== null && this.#isPlannedOut(total)) || !(await this.#isCommitted(step))) return;
      const [lo, hi] = this.#steps.mine(step, total);
      const wanted = { lo: lo + done, hi, first: this.#planned, total, isUnusable: this.#isUnusable };
      const ranges: RowRange[] = [];
      try {
        for await (const range of resolve(this.#pieces(lo + done), wanted)) ranges.push(range);
      } catch (error) {
        if (error instanceof NotCommittedYet) return;
        if (!(error instanceof NoGoodSample)) throw error;
        const { name } = this.#made.member.stream;
        throw new EpochIncomplete(
          `epoch ${this.epoch} of '${name}' has no sample that could be handed out: see \`penstock audit ${name}\``,
        );
      }
      for (const { rows } of ranges) this.#planned += rows.length;
      const last = this.#todo.splice(-1);
      this.#todo.push(...joined([...last, ...ranges]));
    }
  }

  /** Return whether a step may be delivered. The server is asked again when nothing else is left to do. */
  async #isCommitted(step: number): Promise<boolean> {
    const needed = this.#steps.needed(step, this.#total);
    if (this.#walk.end < needed && !this.#isDry) this.#isDry = !(await this.#walk.reach(needed));
    return this.#walk.end >= needed;
  }

  readonly #isUnusable = ({ shard, record }: IndexedPiece): boolean =>
    this.#unusable.has(this.#nameOf(shard, record.entryId));

  #nameOf(shard: number, entryId: string): string {
    return `${this.#partition(shard).number}:${entryId}`;
  }

  /** Yield the pieces from `lo` on, cyclically. Raises NotCommittedYet at positions that are not committed. */
  async *#pieces(lo: number): AsyncGenerator<IndexedPiece> {
    const { server, stream } = this.#made.member;
    let end = lo;
    for await (const piece of this.#walk.pieces(lo)) {
      yield piece;
      end = piece.end;
    }
    const total = this.#total;
    if (total === null || end < total) throw new NotCommittedYet();
    if (this.#head === null) {
      const begun = await shardsInOrder(server, stream, this.#manifest);
      this.#head = new IndexWalk(server, stream, this.#manifest, begun, 0, this.#dropped);
    }
    for (let laps = total; ; laps += total) {
      for await (const piece of this.#head.pieces(0)) {
        yield { ...piece, start: piece.start + laps, end: piece.end + laps };
      }
    }
  }

  // --- fetching ---

  /** Ask for planned entries, as far as the prefetch budget allows. */
  async #ask(): Promise<void> {
    let pending = this.#asked.reduce((sum, { range }) => sum + range.piece.record.bytes, 0);
    const ahead = Math.min(AHEAD_BYTES, Math.floor(this.#queue.budgetBytes / 4));
    while (this.#asked.length < AHEAD_ENTRIES && (pending < ahead || this.#asked.length === 0)) {
      const [range] = this.#todo;
      if (range === undefined || !(await this.#queue.room(pending, 0))) return;
      this.#todo.shift();
      const answer = this.#fetch(range);
      answer.catch(() => {}); // the error is raised where it is awaited
      this.#asked.push({ range, answer });
      pending += range.piece.record.bytes;
    }
  }

  /** Read an entry by id. It touches no group and counts as no delivery, so it may be repeated. */
  async #fetch({ piece: { shard, record } }: RowRange): Promise<StreamEntry | null> {
    const { member, connection } = this.#made;
    const key = this.#partition(shard).entries(this.epoch);
    const read = () => connection.server.call("XRANGE", key, record.entryId, record.entryId);
    return entriesOf(await member.patiently(read))[0] ?? null;
  }

  async #takeAnswer(): Promise<void> {
    const { range, answer } = this.#asked[0] as Asked;
    const entry = await answer;
    if (entry === null) return await this.#missing(range);
    let block: Block;
    try {
      block = await decodeChecked(fieldsOf(entry), this.#made.receive, (header) => this.#check(header, range));
    } catch (error) {
      if (!(error instanceof BadEntry)) throw error;
      if (error instanceof SegmentGone) {
        await this.#made.receive.segments?.require(); // then it is not this entry that is bad
        if ((await this.#fetch(range)) === null) return await this.#missing(range);
      }
      return await this.#bury(range, error);
    }
    this.#asked.shift();
    const { shard, record } = range.piece;
    const lease = new Lease(this.#partition(shard).number, this.epoch, shard, record.entryId, range.rows.length);
    this.#assembler.append(block, lease, isWhole(range) ? null : range.rows);
    this.#received += range.rows.length;
    this.#emit();
    this.#walk.forget(this.#steps.mine(Math.floor(this.#received / this.#steps.batch), null)[0]);
  }

  /** Raise BadEntry if the entry is another one than the index says. */
  #check(header: Header, { piece: { shard, record } }: RowRange): void {
    checkIdentity(header, this.#made.member.stream, this.#manifest);
    const isSame =
      header.shard === shard &&
      header.first === record.first &&
      header.end === record.end &&
      String(header.holes) === String(record.holes);
    if (isSame) return;
    throw new BadEntry(
      `entry of shard ${header.shard} offsets ${header.first}-${header.end - 1}, where the index has shard ${shard} ` +
        `offsets ${record.first}-${record.end - 1}`,
    );
  }

  #emit(): void {
    for (;;) {
      const batch = this.#assembler.take(this.#steps.endOf(this.#emitted));
      if (batch === null) return;
      this.#emitted += 1;
      this.#queue.put(batch);
    }
  }

  /** Write a dead letter of the group, for every rank that meets the entry. Its samples are bad from now on. */
  async #bury(range: RowRange, error: BadEntry): Promise<void> {
    const { member, notify } = this.#made;
    const { shard, record } = range.piece;
    if (error instanceof UnsupportedVersion) throw notReadHere(member.who, this.epoch, record.entryId, error);
    const reason = `${error.name}: ${error.message}`;
    notify(`entry ${record.entryId} of epoch ${this.epoch} is a dead letter: ${reason.slice(0, 300)}`);
    const { group } = member.who;
    await bury(member.server, this.#partition(shard), this.#manifest, group, record.entryId, reason.slice(0, 500));
    this.#leaveOut(range);
  }

  /** Deal with an entry that is in the index and not in the stream. */
  async #missing(range: RowRange): Promise<void> {
    const { member } = this.#made;
    const { stream, server } = member;
    const { shard, start, record } = range.piece;
    const manifest = await loadManifest(server, stream, this.epoch);
    if (manifest.state === "abandoned") {
      throw new EpochNotFound(`epoch ${this.epoch} of '${stream.name}' was abandoned`);
    }
    // an operator may have given it up since this epoch was begun
    const skipped = await skippedBy(member, this.epoch);
    for (const name of skipped.entries) this.#unusable.add(name);
    if (!(await isIndexed(server, this.#partition(shard), this.epoch, shard, record.end, record.entryId))) {
      // the server came back older, and its writer sends the entry again, which then has another id
      this.#dropped = skipped.ranges;
      await this.#readAgain(manifest, range);
      return;
    }
    const total = this.#total;
    if ((total === null || start < total) && !this.#isUnusable(range.piece)) {
      const { group } = member.who;
      throw new EpochIncomplete(
        `epoch ${this.epoch} of '${stream.name}': shard ${shard} offsets ${record.first}-${record.end - 1} (entry ` +
          `${record.entryId}) are in the index and not in the stream, though group '${group}' has not acknowledged them: ` +
          `\`penstock audit ${stream.name} --repair SOURCE...\` makes them again, ` +
          `\`penstock bad drop ${stream.name} ${this.epoch} --group ${group}\` goes on without`,
      );
    }
    this.#leaveOut(range); // acknowledged and removed: another sample pads the last step
  }

  /** Read the index again from the batch of the first row that was to come from this entry. */
  async #readAgain(manifest: Manifest, { first }: RowRange): Promise<void> {
    const { server, stream } = this.#made.member;
    const [begin] = this.#steps.mine(Math.floor(first / this.#steps.batch), null);
    const begun = await shardsInOrder(server, stream, manifest);
    this.#walk = new IndexWalk(server, stream, manifest, begun, Math.min(begin, this.#total ?? begin), this.#dropped);
    this.#head = null;
    this.#isDry = false;
    await this.#refresh(manifest);
    this.#planFrom(first);
  }

  /** Plan again from the first row that was to come from this entry, and take nothing of it. */
  #leaveOut({ piece: { shard, record }, first }: RowRange): void {
    this.#unusable.add(this.#nameOf(shard, record.entryId));
    this.#planFrom(first);
  }

  #planFrom(row: number): void {
    this.#planned = row;
    this.#todo = [];
    this.#asked = [];
  }

  #partition(shard: number): PartitionKeys {
    return partitionOf(this.#made.member.stream, shard);
  }

  /** End an epoch with what was there. An epoch that this group still holds goes if it was abandoned, or lost. */
  async #endReleased(error: EpochNotFound): Promise<void> {
    const { member, notify } = this.#made;
    const { stream, group } = member.who;
    try {
      const { groups } = await loadRoster(member.server, member.begin);
      this.loss = await member.lossOf(this.epoch);
      if (!groups.has(group)) throw error;
      if (this.loss === "")
        notify(`epoch ${this.epoch} of '${stream.name}' was abandoned and released while it was read`);
      this.#queue.end();
    } catch {
      this.#queue.end(error);
    }
  }
}

async function skippedBy({ server, stream, who }: RankMember, epoch: number): Promise<Skipped> {
  const entries = new Set<string>();
  const ranges: DeadNote[] = [];
  for (const partition of stream.partitions) {
    for (const [name, note] of await deadNotes(server, partition, epoch, who.group)) {
      if (name.includes(":")) ranges.push(note);
      else entries.add(`${partition.number}:${name}`);
    }
  }
  return { entries, ranges };
}

/** Raise TooLarge for a step that the budget cannot hold, because it would never be committed as a whole. */
function requireStepFits(stream: Stream, { spec }: ReceiveOptions, { world, batch }: Order): void {
  const sample = spec.reduce((sum, tensor) => sum + (tensor.isRagged ? 0 : tensor.sampleBytes), 0);
  const samples = world * batch;
  const quarter = Math.floor(Math.floor(stream.budgetBytes / stream.partitions.length) * RESERVED_SHARE);
  const edges = 3;
  const step = samples * sample;
  const steps = (1 + HEAD_STEPS) * step;
  const blockBytes = Math.max(sample, Math.min(stream.blockBytes, quarter));
  const needed = steps + edges * blockBytes;
  if (needed <= quarter) return;
  const around = edges * Math.max(sample, stream.blockBytes);
  const block = Math.floor((quarter - steps) / edges);
  const enough = (steps + around) * 4 * stream.partitions.length;
  const advice =
    around > steps && block >= sample
      ? `raise budget_bytes to ${enough}, or make the stream again with block_bytes=${block} or less`
      : `take smaller batches, or raise budget_bytes to ${enough}`;
  throw new TooLarge(
    `a step of ${samples} samples is ${decimalBytes(step)}, which with the blocks around it (${edges} of up to ` +
      `${decimalBytes(blockBytes)}) takes ${decimalBytes(needed)}; stream '${stream.name}' has a quarter of its budget, ${decimalBytes(quarter)} a ` +
      `partition, for what all ranks wait for: ${advice}`,
  );
}

/** Return bytes in decimal units. Other sentences have `readableBytes`. */
function decimalBytes(bytes: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let left = bytes;
  while (left >= 1000 && at < units.length - 1) {
    left /= 1000;
    at += 1;
  }
  return `${at === 0 || left >= 100 ? left.toFixed(0) : left.toPrecision(3)} ${units[at]}`;
}
