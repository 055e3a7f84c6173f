// Shuffling by a seed, in the same order as Python: the permuted blocks of a pass, and the window from which batches
// are drawn.

import { choice, Philox, seedWords } from "./random.js";

/** The order of one shuffled pass, which is that of Python's Replay for the same seed, pass and window. */
export class ShuffleOrder {
  readonly #seeds: readonly bigint[];
  readonly #epoch: number;

  /**
   * @param seed The seed, 0 or more.
   * @param pass The number of the pass.
   * @param epoch The number of the epoch.
   */
  constructor(seed: number, pass: number, epoch: number) {
    this.#seeds = seedWords([seed, pass], 2);
    this.#epoch = epoch;
  }

  /** Return the order in which the pass reads this many blocks. */
  blocks(count: number): number[] {
    const [k0, k1] = seedWords([this.#seeds[0] as bigint], 2) as [bigint, bigint];
    const bits = new Philox([k0, k1]);
    const keys = Array.from({ length: count }, () => bits.next64());
    const order = keys.map((_, at) => at);
    return order.sort((a, b) => compare(keys[a] as bigint, keys[b] as bigint) || a - b);
  }

  /** Return the window from which the pass draws. It is full with `samples` samples, or else with `bytes` bytes. */
  window(batchSize: number, samples: number | null, bytes: number): ShuffleWindow {
    return new ShuffleWindow(new Philox([this.#seeds[1] as bigint, BigInt(this.#epoch)]), batchSize, samples, bytes);
  }
}

function compare(a: bigint, b: bigint): number {
  return a < b ? -1 : Number(a > b);
}

/** A window of sample numbers, which draws each batch at random from those that it holds. It holds no payload. */
export class ShuffleWindow {
  readonly #bits: Philox;
  readonly #batchSize: number;
  readonly #samples: number | null;
  readonly #bytesLimit: number;
  readonly #held: number[] = [];
  readonly #sizes: number[] = [];
  #bytes = 0;
  #isEnded = false;

  constructor(bits: Philox, batchSize: number, samples: number | null, bytesLimit: number) {
    this.#bits = bits;
    this.#batchSize = batchSize;
    this.#samples = samples;
    this.#bytesLimit = bytesLimit;
  }

  /** Take samples in. `bytes` is the size of each, and matters to a window in bytes only. */
  put(numbers: readonly number[], bytes: readonly number[] = []): void {
    for (const [at, number] of numbers.entries()) {
      this.#held.push(number);
      this.#sizes.push(bytes[at] ?? 0);
      this.#bytes += bytes[at] ?? 0;
    }
  }

  /** Give all that is left from now on. */
  end(): void {
    this.#isEnded = true;
  }

  /** Return the samples of the next batch, or null while the window is not full. */
  take(): number[] | null {
    const isFull = this.#samples === null ? this.#bytes >= this.#bytesLimit : this.#held.length >= this.#samples;
    if (this.#held.length === 0 || !(this.#isEnded || isFull)) return null;
    const places = choice(this.#bits, this.#held.length, Math.min(this.#batchSize, this.#held.length));
    const drawn = places.map((place) => this.#held[place] as number);
    for (const place of places) this.#bytes -= this.#sizes[place] as number;
    this.#free(places);
    return drawn;
  }

  /** The last samples move to the places that are free, in the order in which the places were drawn. */
  #free(places: readonly number[]): void {
    const left = this.#held.length - places.length;
    const drawn = new Set(places);
    const stay: number[] = [];
    for (let place = left; place < this.#held.length; place += 1) if (!drawn.has(place)) stay.push(place);
    let next = 0;
    for (const place of places) {
      if (place >= left) continue;
      const from = stay[next] as number;
      this.#held[place] = this.#held[from] as number;
      this.#sizes[place] = this.#sizes[from] as number;
      next += 1;
    }
    this.#held.length = left;
    this.#sizes.length = left;
  }
}
