// The prefetch queue between the readers and the training loop: it is bounded in bytes, by a limit that grows, and
// errors pass through it.

import type { LoaderBatch } from "./batch.js";

/** Four requests of a reader in shared order. A trainer that never waits needs no more. */
const START_BYTES = 8 * 2 ** 20;

/** Raised in a reader whose batches are no longer needed. */
export class QueueStopped extends Error {}

/** The bytes that may wait for one trainer now. It doubles when the trainer found nothing because of it. */
export class PrefetchLimit {
  readonly budgetBytes: number;
  bytes: number;
  #wasFull = false;

  constructor(budgetBytes: number) {
    this.budgetBytes = budgetBytes;
    this.bytes = Math.min(budgetBytes, START_BYTES);
  }

  /** Note that the limit kept the reader from reading more. */
  refused(): void {
    this.#wasFull = true;
  }

  /** Note that the trainer found nothing. */
  starved(): void {
    if (this.#wasFull) this.bytes = Math.min(2 * this.bytes, this.budgetBytes);
    this.#wasFull = false;
  }
}

/** The reader's side of a prefetch queue, or the end of it that one of several readers has. */
export interface ReaderQueue {
  readonly budgetBytes: number;
  /** Whether the reader has to end. */
  readonly isStopped: boolean;
  /** Add a batch without a limit. The reader waits for `room` before it reads more. */
  put(batch: LoaderBatch): void;
  /** Return whether more may be read. Raises QueueStopped. */
  room(pendingBytes: number, timeoutMs: number): Promise<boolean>;
  /** Return whether every batch was taken. Raises QueueStopped. */
  empty(timeoutMs: number): Promise<boolean>;
  /** Note that this reader brings no more batches. */
  end(error?: Error | null): void;
}

/** The queue between readers and the training loop. It is bounded in bytes, and errors pass through it. */
export class PrefetchQueue implements ReaderQueue {
  readonly #limit: PrefetchLimit;
  readonly #batches: LoaderBatch[] = [];
  readonly #waiters = new Set<() => void>();
  #bytes = 0;
  /** The readers that have an end of the queue and bring more. */
  #inputs = 0;
  #isEnded = false;
  #isStopped = false;
  #error: Error | null = null;

  constructor(limit: PrefetchLimit) {
    this.#limit = limit;
  }

  get budgetBytes(): number {
    return this.#limit.budgetBytes;
  }

  get isStopped(): boolean {
    return this.#isStopped;
  }

  /** Return whether no reader brings more batches. */
  get isEnded(): boolean {
    return this.#isEnded;
  }

  /** Return an end of the queue for one of several readers. The queue ends with the last of them. */
  newInput(): ReaderQueue {
    this.#inputs += 1;
    return new QueueInput(this, (error: Error | null) => {
      this.#inputs -= 1;
      if (!this.#isEnded && (error !== null || this.#inputs === 0)) this.end(error);
    });
  }

  /** Return whether every batch was taken and no more will come. */
  get isOver(): boolean {
    return this.#isEnded && this.#batches.length === 0 && this.#error === null;
  }

  // --- the reader's side ---

  /** Add a batch without a limit. The reader waits for `room` before it reads more. */
  put(batch: LoaderBatch): void {
    if (this.#isStopped) return;
    this.#batches.push(batch);
    this.#bytes += batch.bytes;
    this.#changed();
  }

  /** Return whether more may be read. Raises QueueStopped. */
  async room(pendingBytes: number, timeoutMs: number): Promise<boolean> {
    if (!this.#hasRoom(pendingBytes)) {
      this.#limit.refused();
      await this.#until(() => this.#hasRoom(pendingBytes), timeoutMs);
    }
    if (this.#isStopped) throw new QueueStopped();
    return this.#hasRoom(pendingBytes);
  }

  /** Return whether every batch was taken. Raises QueueStopped. */
  async empty(timeoutMs: number): Promise<boolean> {
    await this.#until(() => this.#batches.length === 0, timeoutMs);
    if (this.#isStopped) throw new QueueStopped();
    return this.#batches.length === 0;
  }

  /** Note that no more batches will come. The training loop gets `error` after those that wait here. */
  end(error: Error | null = null): void {
    this.#isEnded = true;
    this.#error = error;
    this.#changed();
  }

  // --- the training loop's side ---

  /**
   * Return the next batch, or null at the timeout or if `isOver`. Raises the reader's error.
   *
   * The batch stays here until `ready` returns, and is not lost if that fails.
   */
  async get(timeoutMs: number, ready?: (batch: LoaderBatch) => Promise<void>): Promise<LoaderBatch | null> {
    if (this.#batches.length === 0 && !this.#isEnded) {
      this.#limit.starved();
      await this.#until(() => this.#batches.length > 0 || this.#isEnded, timeoutMs);
    }
    const first = this.#batches[0];
    if (first !== undefined) await ready?.(first);
    const batch = this.#batches.shift();
    if (batch !== undefined) {
      this.#bytes -= batch.bytes;
      this.#changed();
      return batch;
    }
    if (this.#error !== null) throw this.#error; // at every call: an epoch that broke off never looks complete
    return null;
  }

  /** Tell the reader to end, and drop the batches. */
  stop(): void {
    this.#isStopped = true;
    this.#batches.length = this.#bytes = 0;
    this.#changed();
  }

  #hasRoom(pendingBytes: number): boolean {
    return this.#batches.length === 0 || this.#bytes + pendingBytes < this.#limit.bytes;
  }

  #changed(): void {
    for (const wake of this.#waiters) wake();
  }

  /** Return when the condition holds, the queue is stopped, or the time is up. */
  #until(holds: () => boolean, timeoutMs: number): Promise<void> {
    if (this.#isStopped || holds() || timeoutMs <= 0) return Promise.resolve();
    return new Promise((resolve) => {
      const finish = () => {
        clearTimeout(timer);
        this.#waiters.delete(wake);
        resolve();
      };
      const wake = () => {
        if (this.#isStopped || holds()) finish();
      };
      const timer = setTimeout(finish, timeoutMs);
      this.#waiters.add(wake);
    });
  }
}

/** The end of a prefetch queue that one of several readers has. An error of one ends them all. */
class QueueInput implements ReaderQueue {
  readonly #queue: PrefetchQueue;
  readonly #ended: (error: Error | null) => void;

  constructor(queue: PrefetchQueue, ended: (error: Error | null) => void) {
    this.#queue = queue;
    this.#ended = ended;
  }

  get budgetBytes(): number {
    return this.#queue.budgetBytes;
  }

  get isStopped(): boolean {
    return this.#queue.isStopped || this.#queue.isEnded;
  }

  put(batch: LoaderBatch): void {
    this.#queue.put(batch);
  }

  async room(pendingBytes: number, timeoutMs: number): Promise<boolean> {
    const hasRoom = await this.#queue.room(pendingBytes, timeoutMs);
    if (this.isStopped) throw new QueueStopped();
    return hasRoom;
  }

  async empty(timeoutMs: number): Promise<boolean> {
    const isEmpty = await this.#queue.empty(timeoutMs);
    if (this.isStopped) throw new QueueStopped();
    return isEmpty;
  }

  end(error: Error | null = null): void {
    this.#ended(error);
  }
}
