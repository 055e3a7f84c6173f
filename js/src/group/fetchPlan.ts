// Plans the requests of a shared reader: which partition it asks next, for how many entries, and how long the request
// waits.

/** The requests under way at once. The server prepares the next reply while the reader receives this one. */
const AHEAD = 2;
/** The payload bytes of one request. */
const REQUEST_BYTES = 2_000_000;
const MOST_ENTRIES = 64;
/** The longest wait of an idle read. It is finite, because an epoch may end without another entry. */
const BLOCK_MS = 100;
/** The shortest wait. It grows while nothing comes. */
const SHORTEST_MS = 10;

/** One read of one partition. */
export interface FetchRequest {
  readonly partition: number;
  /** The most entries to return. */
  readonly most: number;
  /** How long the request waits for an entry, or null for not at all. */
  readonly blockMs: number | null;
}

/** The plan of one reader's requests. The reader reports each answer to it. */
export class FetchPlanner {
  /** The bytes of one request: a small share of the prefetch budget, so that members of a group share fairly. */
  readonly requestBytes: number;
  readonly #partitions: number;
  #entryBytes = 0;
  #turn = 0;
  /** Successive answers without an entry. */
  #empty = 0;
  #isDrained = false;

  constructor(partitions: number, budgetBytes: number) {
    this.#partitions = partitions;
    this.requestBytes = Math.min(REQUEST_BYTES, Math.floor(budgetBytes / (2 * AHEAD)));
  }

  /** Return whether every partition gave the same number of answers that brought nothing. */
  get endsSweep(): boolean {
    return this.#empty > 0 && this.#empty % this.#partitions === 0;
  }

  /** Forget the answers so far, because they say nothing about what exists now. */
  restart(): void {
    this.#empty = 0;
  }

  /** Note that an entry of `bytes` payload came. */
  received(bytes: number): void {
    this.#entryBytes += (bytes - this.#entryBytes) * (this.#entryBytes > 0 ? 0.2 : 1);
  }

  /** Note that a request brought this many entries. */
  answered({ most }: FetchRequest, entries: number): void {
    if (entries === 0) {
      this.#empty += 1;
      return;
    }
    this.#isDrained = entries < most || this.#empty > 0;
    this.#empty = 0;
  }

  /** Return the requests to send now. In an epoch that is ended none of them waits. */
  nextRequests(underWay: number, isEnded: boolean): FetchRequest[] {
    const size = this.#partitions;
    const isIdle = this.#empty >= size;
    const isSlow = isIdle || (size === 1 && this.#isDrained);
    if (isSlow && underWay > 0) return [];
    const most = this.#most();
    // an idle reader of several partitions sweeps over them, and the last request of a sweep waits
    const count = isSlow ? (size === 1 ? 1 : size - (this.#empty % size)) : AHEAD - underWay;
    const requests: FetchRequest[] = [];
    for (let at = 0; at < count; at += 1) {
      const isLast = isSlow ? at === count - 1 : this.#turn % Math.max(size, AHEAD) === Math.max(size, AHEAD) - 1;
      const blockMs = isEnded || !isLast ? null : this.#patienceMs();
      requests.push({ partition: this.#turn % size, most: isSlow && size > 1 ? 1 : most, blockMs });
      this.#turn += 1;
    }
    return requests;
  }

  #most(): number {
    if (this.#entryBytes === 0) return 1;
    return Math.max(1, Math.min(MOST_ENTRIES, Math.floor(this.requestBytes / this.#entryBytes)));
  }

  #patienceMs(): number | null {
    const sweeps = Math.floor(this.#empty / this.#partitions);
    if (this.#partitions > 1 && sweeps === 0) return null; // a wait for one partition delays entries of the others
    return Math.min(BLOCK_MS, SHORTEST_MS * 2 ** Math.min(sweeps, 4));
  }
}
