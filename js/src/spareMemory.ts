// Spare memory: array buffers that are kept, so that later batches and replies need no fresh memory. `batch.ts` and
// `server/resp.ts` give the limits in bytes.

const MOST_PIECES = 64;

/** Memory that nobody uses any more. Fresh memory costs page faults and garbage collections. */
export class SpareMemory {
  readonly #limitBytes: number;
  readonly #pieces: ArrayBuffer[] = [];
  #bytes = 0;

  /** @param limitBytes The most memory that is kept. */
  constructor(limitBytes: number) {
    this.#limitBytes = limitBytes;
  }

  /** Keep memory for later, in place of the oldest if there is too much. */
  keep(memory: ArrayBuffer): void {
    this.#pieces.push(memory);
    this.#bytes += memory.byteLength;
    while (this.#bytes > this.#limitBytes || this.#pieces.length > MOST_PIECES) this.#remove(0);
  }

  /** Return kept memory of `least` to `most` bytes, with old contents, or undefined. */
  take(least: number, most = least): ArrayBuffer | undefined {
    const at = this.#pieces.findIndex(({ byteLength }) => byteLength >= least && byteLength <= most);
    return at < 0 ? undefined : this.#remove(at);
  }

  #remove(at: number): ArrayBuffer {
    const [found] = this.#pieces.splice(at, 1) as [ArrayBuffer];
    this.#bytes -= found.byteLength;
    return found;
  }
}
