// The verbs of tf.data (map, filter, take, skip, repeat, batch, prefetch, shuffle) over elements that know their rows.
// Each stage ends the one before it when it is ended itself, which tf.data does not do, and disposes of the tensors
// that it drops.

import type { Share, StepTracker } from "./stepTracking.js";
import type { Tf, TfIterator } from "./tf.js";

/** An element of a dataset, and the rows of the source that it was made of. */
export interface Item {
  readonly value: unknown;
  readonly shares: readonly Share[];
}

export type Items = AsyncGenerator<Item, void, void>;

/** The stages of one dataset. */
export class Stages {
  readonly #tf: Tf;
  readonly #tracker: StepTracker;

  constructor(tf: Tf, tracker: StepTracker) {
    this.#tf = tf;
    this.#tracker = tracker;
  }

  async *map(items: Items, transform: (value: unknown) => unknown): Items {
    for await (const { value, shares } of items) {
      const mapped = this.#tf.tidy(() => transform(value));
      this.#dispose(value, mapped);
      yield { value: mapped, shares };
    }
  }

  async *mapAsync(items: Items, transform: (value: unknown) => Promise<unknown>): Items {
    for await (const { value, shares } of items) {
      const mapped = await transform(value);
      this.#dispose(value, mapped);
      yield { value: mapped, shares };
    }
  }

  async *filter(items: Items, predicate: (value: unknown) => unknown): Items {
    for await (const item of items) {
      if (this.#tf.tidy(() => predicate(item.value))) yield item;
      else await this.#drop(item);
    }
  }

  async *take(items: Items, count: number): Items {
    if (count === 0) return;
    let taken = 0;
    for await (const item of items) {
      yield item;
      taken += 1;
      if (taken === count) return;
    }
  }

  async *skip(items: Items, count: number): Items {
    let skipped = 0;
    for await (const item of items) {
      if (skipped >= count) yield item;
      else await this.#drop(item);
      skipped += 1;
    }
  }

  async *repeat(open: () => Items, count: number): Items {
    for (let pass = 0; count < 0 || pass < count; pass += 1) yield* open();
  }

  async *batch(items: Items, size: number, smallLastBatch: boolean): Items {
    let rows: Item[] = [];
    for await (const item of items) {
      rows.push(item);
      if (rows.length < size) continue;
      yield await this.#stacked(rows);
      rows = [];
    }
    if (rows.length > 0 && smallLastBatch) yield await this.#stacked(rows);
    else for (const row of rows) await this.#drop(row);
  }

  async *prefetch(items: Items, size: number): Items {
    const asked: Promise<IteratorResult<Item, void>>[] = [];
    const ask = () => {
      const found = items.next();
      found.catch(() => {}); // the error is raised where it is awaited
      asked.push(found);
    };
    try {
      while (asked.length < size) ask();
      for (;;) {
        ask();
        const found = await (asked.shift() as (typeof asked)[number]);
        if (found.done) return;
        yield found.value;
      }
    } finally {
      await items.return();
      for (const found of asked) this.#dispose((await found.catch(() => null))?.value?.value);
    }
  }

  /**
   * Yield the elements in the order of a shuffling of tf.data.
   *
   * @param shuffle Return an iterator of the shuffled elements of another one, which must not fail.
   */
  async *shuffle(items: Items, shuffle: (source: TfIterator) => Promise<TfIterator>): Items {
    let failure: { error: unknown } | null = null;
    const next = async (): Promise<IteratorResult<Item, void>> => {
      try {
        return await items.next();
      } catch (error) {
        failure = { error };
        return { done: true, value: undefined };
      }
    };
    const drawn = (await shuffle({ next })) as AsyncIterator<Item>;
    try {
      for (let found = await drawn.next(); !found.done; found = await drawn.next()) yield found.value;
      if (failure !== null) throw (failure as { error: unknown }).error;
    } finally {
      await items.return();
      for (let found = await drawn.next(); !found.done; found = await drawn.next()) this.#dispose(found.value.value);
    }
  }

  async #stacked(rows: readonly Item[]): Promise<Item> {
    const values = rows.map(({ value }) => value).values();
    const batches = this.#tf.data.generator(async () => ({ next: async () => values.next() })).batch(rows.length);
    const { value } = await (await batches.iterator()).next();
    return { value, shares: rows.flatMap(({ shares }) => shares) };
  }

  async #drop({ value, shares }: Item): Promise<void> {
    this.#dispose(value);
    await this.#tracker.finish(shares);
  }

  /** Dispose of the tensors of an element, but not of those that a second one contains, too. */
  #dispose(value: unknown, kept?: unknown): void {
    const keeps = new Set(this.#tensors(kept));
    for (const tensor of this.#tensors(value)) if (!keeps.has(tensor)) tensor.dispose();
  }

  /** Find tensors. Unlike tf.dispose, it does not walk over each byte of a Uint8Array. */
  #tensors(value: unknown): { dispose(): void }[] {
    if (value instanceof this.#tf.Tensor) return [value as { dispose(): void }];
    if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return [];
    return Object.values(value).flatMap((one) => this.#tensors(one));
  }
}
