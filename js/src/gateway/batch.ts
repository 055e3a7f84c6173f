import { Batch } from "../batch.js";

/** A batch that a group was given through a gateway. */
export class GatewayBatch extends Batch {
  readonly #acknowledge: (batch: GatewayBatch) => Promise<void>;

  constructor({ epoch, size, tensors, spans }: Batch, acknowledge: (batch: GatewayBatch) => Promise<void>) {
    super(epoch, size, tensors, spans);
    this.#acknowledge = acknowledge;
  }

  /**
   * Acknowledge the batch: it is never delivered again to this group. A second call does nothing. After a lost connection
   * the group hands the batch out again, and a line says so.
   *
   * @returns Once Redis has it.
   */
  async ack(): Promise<void> {
    await this.#acknowledge(this);
  }
}
