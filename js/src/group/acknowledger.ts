// The outstanding batches of a loader, and when each is acknowledged: at the next batch, by `ack` or at a checkpoint.

import { closedBefore } from "../batch.js";
import type { LoaderBatch } from "./batch.js";
import type { Acknowledge } from "./options.js";
import type { Reading } from "./reading.js";

/** The batches of one loader from handing out to acknowledgement. */
export class Acknowledger {
  readonly policy: Acknowledge;
  /** Batches and samples delivered since the loader was made. */
  batches = 0;
  samples = 0;
  /** The batch that was delivered last. */
  last: LoaderBatch | null = null;
  readonly #reading: Reading;
  /** What was delivered and is not acknowledged, in order. */
  readonly #outstanding = new Set<LoaderBatch>();
  /** The batch that the loop has, if asking for the next one acknowledges it. */
  #inHand: LoaderBatch | null = null;
  /** The batches that wait for an earlier one, because ordered groups acknowledge by position. */
  #heldUp: LoaderBatch[] = [];
  #turn: Promise<unknown> = Promise.resolve();
  #isClosed = false;

  constructor(policy: Acknowledge, reading: Reading) {
    this.policy = policy;
    this.#reading = reading;
  }

  /** The payload bytes that were delivered and are not acknowledged. */
  get handedBytes(): number {
    let bytes = 0;
    for (const batch of this.#outstanding) bytes += batch.bytes;
    return bytes;
  }

  /** The samples that were delivered and are not acknowledged. */
  get unacknowledged(): number {
    let samples = 0;
    for (const { size } of this.#outstanding) samples += size;
    return samples;
  }

  /** Hand a batch to the loop. */
  hand(batch: LoaderBatch): LoaderBatch {
    this.batches += 1;
    this.samples += batch.size;
    this.last = batch;
    this.#outstanding.add(batch);
    if (this.policy === "next") this.#inHand = batch;
    return batch.handTo((one) => this.acknowledge(one));
  }

  /** Note that the loop is done with the batch that it had. The server may answer later. */
  async askedForNext(): Promise<void> {
    const batch = this.#inHand;
    this.#inHand = null;
    if (batch !== null) await this.#acknowledgeBatch(batch);
  }

  /** Acknowledge a batch, and return once the server has it: whether all its samples were still this member's. */
  async acknowledge(batch: LoaderBatch): Promise<boolean> {
    if (batch === this.#inHand) this.#inHand = null;
    if (this.#isClosed && this.#outstanding.has(batch)) {
      throw closedBefore(this.#reading.member.stream.name, batch.size);
    }
    const sent = await this.#acknowledgeBatch(batch);
    const isWhole = batch.leased.every(({ lease }) => !lease.isLost);
    await Promise.all(sent);
    return isWhole;
  }

  /** Acknowledge nothing any more, because the loader leaves the group. */
  close(): void {
    this.#isClosed = true;
  }

  /** Acknowledge everything that was delivered, and return once the server has it. */
  async checkpoint(): Promise<void> {
    this.#inHand = null;
    for (const batch of [...this.#outstanding]) await this.#acknowledgeBatch(batch);
    await this.#reading.member.flush();
  }

  /** Acknowledge nothing of what was delivered, because reading continues elsewhere. */
  forget(): void {
    this.#outstanding.clear();
    this.#heldUp = [];
    this.#inHand = null;
    this.last = null;
  }

  /** Close an epoch for the group after it was read to its end, unless a part of it is not acknowledged. */
  async endEpoch(epoch: number): Promise<void> {
    const { member } = this.#reading;
    await this.#alone(async () => {
      if (member.hasUnacknowledged(epoch)) member.unclosed.add(epoch);
      else await member.closeEpochs(epoch);
    });
  }

  /** Send what acknowledges a batch. Returns what the server has yet to answer. */
  async #acknowledgeBatch(batch: LoaderBatch): Promise<Promise<void>[]> {
    if (!this.#outstanding.delete(batch)) return [];
    return await this.#alone(async () => {
      const { member } = this.#reading;
      const sent: Promise<void>[] = [];
      const due = this.#reading.isOrdered ? this.#inOrder(batch) : [batch];
      for (const one of due) sent.push(...(await member.acknowledge(one)));
      for (const epoch of new Set(due.map((one) => one.epoch))) {
        if (member.unclosed.has(epoch) && !member.hasUnacknowledged(epoch)) await member.closeEpochs(epoch);
      }
      return sent;
    });
  }

  /** Return the batches of an ordered group that may be acknowledged: those before every outstanding batch. */
  #inOrder(batch: LoaderBatch): LoaderBatch[] {
    if (this.policy === "manual") return [batch]; // the user's own decision: everything up to this batch
    const [first] = [...this.#outstanding].sort(canonical);
    const due = [...this.#heldUp, batch].sort(canonical);
    this.#heldUp = first === undefined ? [] : due.filter((one) => canonical(one, first) > 0);
    return due.filter((one) => !this.#heldUp.includes(one));
  }

  /** Run one acknowledgement at a time: closing an epoch looks at all of them. */
  #alone<T>(act: () => Promise<T>): Promise<T> {
    const turn = this.#turn.then(act);
    this.#turn = turn.catch(() => {});
    return turn;
  }
}

function canonical(a: LoaderBatch, b: LoaderBatch): number {
  return a.epoch - b.epoch || a.position - b.position;
}
