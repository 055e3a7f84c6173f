// A `tf.data.Dataset` whose elements know their rows through every verb of tf.data, and the iterations that end with
// it.

import { BadOption } from "../errors.js";
import { type Items, Stages } from "./stages.js";
import type { Delivered, StepTracker } from "./stepTracking.js";
import type { Tf, TfIterator } from "./tf.js";

/** The iterations of a dataset, and of all that were derived from it. */
export class Iterations {
  readonly #running = new Set<Items>();
  #isClosed = false;

  requireOpen(): void {
    if (this.#isClosed) throw new BadOption("this dataset is closed: make another one");
  }

  get isClosed(): boolean {
    return this.#isClosed;
  }

  /** Begin an iteration once an earlier one of the same dataset has ended. */
  begin(open: () => Items, earlier: Items | null): Items {
    const items: Items = this.#run(open, earlier, () => items);
    return items;
  }

  async *#run(open: () => Items, earlier: Items | null, self: () => Items): Items {
    await earlier?.return();
    this.#running.add(self());
    try {
      yield* open();
    } finally {
      this.#running.delete(self());
    }
  }

  /** End all of them. `release` ends what they may be waiting for. */
  async close(release: () => Promise<void>): Promise<void> {
    this.#isClosed = true;
    const endings = [...this.#running].map((items) => items.return());
    try {
      await release();
    } finally {
      await Promise.allSettled(endings);
    }
  }
}

/**
 * Return the elements as a dataset of `tf`.
 *
 * @param open Begins an iteration. It is called when the first element is asked for.
 */
export function track(tf: Tf, tracker: StepTracker, iterations: Iterations, open: () => Items): object {
  const stages = new Stages(tf, tracker);

  class Tracked extends tf.data.Dataset {
    readonly size = null;
    readonly #open: () => Items;
    #latest: Items | null = null;

    constructor(open: () => Items) {
      super();
      this.#open = open;
    }

    async iterator(): Promise<TfIterator> {
      tracker.throwIfFailed();
      iterations.requireOpen();
      return await tf.data.generator(async () => this.#iterate()).iterator();
    }

    map(transform: (value: unknown) => unknown): Tracked {
      return new Tracked(() => stages.map(this.#open(), transform));
    }

    mapAsync(transform: (value: unknown) => Promise<unknown>): Tracked {
      return new Tracked(() => stages.mapAsync(this.#open(), transform));
    }

    filter(predicate: (value: unknown) => unknown): Tracked {
      return new Tracked(() => stages.filter(this.#open(), predicate));
    }

    take(count = -1): Tracked {
      return new Tracked(() => stages.take(this.#open(), count));
    }

    skip(count = 0): Tracked {
      return new Tracked(() => stages.skip(this.#open(), count));
    }

    repeat(count = -1): Tracked {
      return new Tracked(() => stages.repeat(this.#open, count));
    }

    batch(size: number, smallLastBatch = true): Tracked {
      return new Tracked(() => stages.batch(this.#open(), size, smallLastBatch));
    }

    prefetch(size: number): Tracked {
      return new Tracked(() => stages.prefetch(this.#open(), size));
    }

    shuffle(size: number, seed?: string, reshuffleEachIteration = true): Tracked {
      let source: TfIterator;
      const drawn = tf.data.generator(async () => source).shuffle(size, seed, reshuffleEachIteration);
      const shuffle = (unshuffled: TfIterator) => {
        source = unshuffled; // the iterator asks for it at once
        return drawn.iterator();
      };
      return new Tracked(() => stages.shuffle(this.#open(), shuffle));
    }

    #iterate(): TfIterator {
      const delivered: Delivered = [];
      let items: Items | null = null;
      let isDone = false;
      const next = async (): Promise<IteratorResult<unknown, unknown>> => {
        if (items === null) {
          items = iterations.begin(this.#open, this.#latest);
          this.#latest = items;
        }
        try {
          const found = await items.next();
          if (!found.done) {
            tracker.deliver(delivered, found.value.shares);
            return { done: false, value: found.value.value };
          }
          if (!isDone && items !== this.#latest) throw new BadOption("two iterations of one dataset at the same time");
        } catch (error) {
          if (!iterations.isClosed) tracker.fail(error as Error); // thrown here, it ends the process behind a prefetch
        }
        isDone = true;
        return { done: true, value: null };
      };
      return { next };
    }
  }

  return new Tracked(open);
}
