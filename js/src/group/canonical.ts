// Canonical order, pure: positions of an epoch to entries and rows of them. Beyond the epoch's end positions run on
// cyclically from its start, which is how a last step is padded.

import type { IndexRecord } from "../stream/indexRecords.js";
import type { Remainder } from "./options.js";

/** One index record in its place. */
export interface IndexedPiece {
  /** The position of its first offset. */
  readonly start: number;
  /** The position after its last offset. */
  readonly end: number;
  readonly shard: number;
  readonly record: IndexRecord;
}

/** Consecutive rows of the batches of one rank, all from one entry: what one fetch brings. */
export interface RowRange {
  readonly piece: IndexedPiece;
  /** Indices of the entry's samples. They rise, and are repeated where they fill holes. */
  readonly rows: readonly number[];
  /** The number of the first of them among all rows that this reader hands out. */
  readonly first: number;
}

/** No sample of the epoch can be delivered, so nothing can stand in for bad ones. */
export class NoGoodSample extends Error {}

/** The cut of an epoch into steps. In each step every rank has a batch. */
export class EpochSteps {
  /** Where the first step of this reader begins. */
  readonly start: number;
  readonly batch: number;
  /** The positions in a step. */
  readonly size: number;
  readonly #rank: number;
  readonly #remainder: Remainder;

  constructor(
    start: number,
    { rank, world, batch }: { readonly rank: number; readonly world: number; readonly batch: number },
    remainder: Remainder,
  ) {
    this.start = start;
    this.batch = batch;
    this.size = world * batch;
    this.#rank = rank;
    this.#remainder = remainder;
  }

  /** Return the position after a step. */
  endOf(step: number): number {
    return this.start + (step + 1) * this.size;
  }

  /** Return the number of steps from `start` to the end of an epoch of `total` positions. */
  count(total: number): number {
    const left = Math.max(total - this.start, 0);
    return this.#remainder === "drop" ? Math.floor(left / this.size) : Math.ceil(left / this.size);
  }

  /** Return the position below which all has to be committed before a step can be delivered. */
  needed(step: number, total: number | null): number {
    return total === null ? this.endOf(step) : Math.min(this.endOf(step), total);
  }

  /** Return the positions [lo, hi) of this rank's batch, beyond `total` where it is padded. */
  mine(step: number, total: number | null): readonly [lo: number, hi: number] {
    const lo = this.start + step * this.size + this.#rank * this.batch;
    const hi = lo + this.batch;
    return [lo, total === null || this.#remainder !== "keep" ? hi : Math.min(hi, total)];
  }
}

/** The positions that are wanted, and what is known of the epoch. */
export interface WantedPositions {
  readonly lo: number;
  readonly hi: number;
  /** The number of the first row. */
  readonly first: number;
  readonly total: number | null;
  readonly isUnusable: (piece: IndexedPiece) => boolean;
}

/**
 * Yield the rows that stand for positions [lo, hi). In place of a hole, and of a sample in an unusable entry, comes the
 * next good sample.
 *
 * @param pieces They begin at `lo` or before, and run on cyclically.
 * @throws NoGoodSample once a whole epoch has none.
 */
export async function* resolve(
  pieces: AsyncIterable<IndexedPiece>,
  { lo, hi, first, total, isUnusable }: WantedPositions,
): AsyncGenerator<RowRange> {
  let missing = 0;
  let next = first;
  for await (const piece of pieces) {
    const isGood = piece.record.count > 0 && !isUnusable(piece);
    const fill = isGood ? missing : 0;
    const filling = new Array<number>(fill).fill(0);
    if (piece.start >= hi) {
      if (fill > 0) yield { piece, rows: filling, first: next };
      if (fill > 0 || missing === 0) return;
    }
    const [from, to] = [Math.max(lo, piece.start), Math.min(hi, piece.end)];
    if (isGood && (from < to || fill > 0)) {
      const { rows, spilt } = rowsOf(piece.record, from - piece.start, Math.max(to, from) - piece.start);
      filling.push(...rows);
      if (filling.length > 0) yield { piece, rows: filling, first: next };
      next += filling.length;
      missing = spilt;
    } else if (from < to) missing += to - from;
    if (piece.end >= hi && missing === 0) return;
    if (total !== null && piece.start > hi + total) throw new NoGoodSample();
  }
}

/** Return rows for the offsets [first + lo, first + hi), and how many of them need a row of a later entry. */
function rowsOf({ first, count, holes }: IndexRecord, lo: number, hi: number): { rows: number[]; spilt: number } {
  const isHole = new Set(holes);
  const rows: number[] = [];
  let spilt = 0;
  let row = 0; // of the next good sample
  for (let at = first; at < first + hi; at += 1) {
    if (at >= first + lo) {
      if (row < count) rows.push(row);
      else spilt += 1;
    }
    if (!isHole.has(at)) row += 1;
  }
  return { rows, spilt };
}

/** Return neighbours from one entry as one: an entry is fetched once for a run of rows. */
export function joined(ranges: Iterable<RowRange>): RowRange[] {
  const found: RowRange[] = [];
  for (const range of ranges) {
    const last = found.at(-1);
    const isSame = last?.piece.shard === range.piece.shard && last.piece.record.entryId === range.piece.record.entryId;
    if (isSame) found[found.length - 1] = { ...last, rows: [...last.rows, ...range.rows] };
    else found.push(range);
  }
  return found;
}

/** Return whether the rows are every sample of the entry, once, in order. */
export function isWhole({ piece, rows }: RowRange): boolean {
  return rows.length === piece.record.count && rows.every((row, at) => row === at);
}
