// The rows that make an element: whole batches of the source, batches of another size, or rows drawn from a window.

import { BatchBuilder } from "../batch.js";
import { Philox, seedWords } from "../shuffle/random.js";
import { ShuffleWindow } from "../shuffle/shuffle.js";
import type { Column } from "../wire/codec.js";
import type { SourceBatch } from "./stepTracking.js";

/** The rows [from, to) of tensors, all of one batch of the source. */
export interface Piece {
  readonly owner: SourceBatch;
  readonly tensors: Readonly<Record<string, Column>>;
  readonly from: number;
  readonly to: number;
}

/** A window of samples from which rows are drawn at random. */
export interface RowShuffle {
  /** The samples in the window. */
  readonly window: number;
  /** A seed. Each pass has an order of its own. */
  readonly seed: number;
}

/** Yield each piece as a group of its own. */
export async function* alone(pieces: AsyncIterable<Piece>): AsyncGenerator<Piece[]> {
  for await (const piece of pieces) yield [piece];
}

/** Yield the same rows in groups of `size`. The last group may be smaller. */
export async function* grouped(pieces: AsyncIterable<Piece>, size: number): AsyncGenerator<Piece[]> {
  let group: Piece[] = [];
  let count = 0;
  for await (const piece of pieces) {
    for (let { from } = piece; from < piece.to; ) {
      const to = Math.min(piece.to, from + size - count);
      group.push({ ...piece, from, to });
      count += to - from;
      from = to;
      if (count < size) continue;
      yield group;
      group = [];
      count = 0;
    }
  }
  if (count > 0) yield group;
}

/** Yield the rows one by one, in the order in which they are drawn from a window. */
export async function* shuffled(
  pieces: AsyncIterable<Piece>,
  shuffle: RowShuffle,
  pass: number,
): AsyncGenerator<Piece> {
  const [k0, k1] = seedWords([shuffle.seed, pass], 2) as [bigint, bigint];
  const window = new ShuffleWindow(new Philox([k0, k1]), 1, shuffle.window, 0);
  const held = new Map<number, Piece>();
  let next = 0;
  const drawn = function* () {
    for (let found = window.take(); found !== null; found = window.take()) {
      const number = found[0] as number;
      yield held.get(number) as Piece;
      held.delete(number);
    }
  };
  for await (const piece of pieces) {
    for (let row = piece.from; row < piece.to; row += 1) {
      held.set(next, copied(piece, row));
      window.put([next]);
      next += 1;
      yield* drawn();
    }
  }
  window.end();
  yield* drawn();
}

/** Copy one row, so that a window does not keep whole batches alive. */
function copied({ owner, tensors }: Piece, row: number): Piece {
  const spec = Object.values(tensors).map((column) => column.spec);
  const builder = new BatchBuilder(spec, owner.batch.epoch, 1);
  builder.add(new Map(Object.entries(tensors)), 0, [], row, row + 1);
  return { owner, tensors: builder.build().tensors, from: 0, to: 1 };
}
