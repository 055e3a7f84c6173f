// Step tracking: which batches of the source a training job is done with, however its elements were mapped, filtered,
// batched or shuffled.

import type { Batch } from "../batch.js";
import { BadOption } from "../errors.js";

/** Rows of a batch of the source, which an element was made of. */
export interface Share {
  readonly batch: SourceBatch;
  readonly rows: number;
}

/** A batch that the source delivered, and how many of its rows the training job still needs. */
export interface SourceBatch {
  readonly batch: Batch;
  /** The source's state behind this batch. */
  readonly state: unknown;
  /** The batches of the same pass that are not finished, in the source's order. */
  readonly pass: SourceBatch[];
  left: number;
}

/** What a consumer of a dataset was given and has not finished, oldest first. */
export type Delivered = (readonly Share[])[];

/** Acknowledges the batches of a source once the training step is done with all their rows, and keeps the first error. */
export class StepTracker {
  #delivered: Delivered = [];
  #state: unknown;
  #error: Error | null = null;
  #isClosed = false;

  /** Note that an element was delivered to a consumer. Its steps end in the order of delivery. */
  deliver(delivered: Delivered, shares: readonly Share[]): void {
    delivered.push(shares);
    this.#delivered = delivered;
  }

  /** Note that the step is done with the oldest element of the consumer that was served last. */
  async endStep(): Promise<boolean> {
    return await this.finish(this.#delivered.shift() ?? []);
  }

  /** Note that the consumer that was served last is done with all elements. Returns whether all are acknowledged. */
  async endPass(): Promise<boolean> {
    let areAcknowledged = true;
    while (this.#delivered.length > 0) areAcknowledged = (await this.endStep()) && areAcknowledged;
    return areAcknowledged;
  }

  /** Acknowledge nothing any more, because the source is closed. */
  close(): void {
    this.#isClosed = true;
  }

  /**
   * Note that these rows are no longer needed, and acknowledge the batches that are finished by that.
   *
   * @returns False if a connection broke before, so that batches are handed out again.
   */
  async finish(shares: readonly Share[]): Promise<boolean> {
    let areAcknowledged = true;
    for (const { batch: owner, rows } of shares) {
      owner.left -= rows;
      if (owner.left > 0) continue;
      const { batch, pass } = owner;
      if (!this.#isClosed && "ack" in batch && typeof batch.ack === "function") {
        areAcknowledged = (await batch.ack()) !== false && areAcknowledged;
      }
      while (pass[0]?.left === 0) this.#state = (pass.shift() as SourceBatch).state;
    }
    return areAcknowledged;
  }

  /** Return the source's state behind the last batch up to which all are finished. */
  get state(): unknown {
    if (this.#state === undefined) throw new BadOption("a dataset has no state before its first step is done");
    return this.#state;
  }

  /** Keep an error for the training job. The first one counts. */
  fail(error: Error): void {
    this.#error ??= error;
  }

  throwIfFailed(): void {
    if (this.#error !== null) throw this.#error;
  }
}
