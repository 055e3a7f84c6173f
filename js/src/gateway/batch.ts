// A batch that came through a gateway, with the `ack` that acknowledges it.

import { Batch } from "../batch.js";

/** A batch that a group was given through a gateway. */
export class GatewayBatch extends Batch {
  readonly #acknowledge: (batch: GatewayBatch) => Promise<boolean>;
  #answer: Promise<boolean> | null = null;

  constructor({ epoch, size, tensors, spans }: Batch, acknowledge: (batch: GatewayBatch) => Promise<boolean>) {
    super(epoch, size, tensors, spans);
    this.#acknowledge = acknowledge;
  }

  /**
   * Acknowledge the batch: it is never delivered again to this group. A second call returns what the first one did.
   *
   * @returns True once the server has it. False if the connection broke before: the group hands the samples out again, and
   *   a line says so.
   * @throws PenstockError if the loader was closed before.
   */
  ack(): Promise<boolean> {
    this.#answer ??= this.#acknowledge(this);
    return this.#answer;
  }
}
