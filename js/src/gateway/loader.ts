// The loader that reads through a gateway: iteration, acknowledgement, and joining as a new member after a lost
// connection.

import type { DatasetOf, TfLike } from "../adapters/tf.js";
import { type DatasetControls, type DatasetOptions, dataset } from "../adapters/tfjs.js";
import { closedBefore } from "../batch.js";
import { GroupFinished, PenstockError, ServerUnavailable, WaitTimeout } from "../errors.js";
import { OUTAGE_MS, Outage } from "../waiting.js";
import type { Spec } from "../wire/spec.js";
import { GatewayBatch } from "./batch.js";
import { GatewayConnection, NothingCame } from "./connection.js";
import { type ChosenGateway, chosenGateway, type GatewayOptions } from "./options.js";

/** What a reader of a gateway reads. */
export interface GatewayFacts {
  readonly spec: Spec;
  /** The producer's facts about the stream, such as the names of classes. */
  readonly info: Record<string, unknown>;
  /** The name of this member in its group. */
  readonly member: string;
}

/**
 * The batches of a stream for one member of a group, through `penstock gateway`. See `load`.
 *
 * After a lost connection it connects again as a new member. The group hands out again what was not acknowledged, and an
 * iteration goes on with what the group has left.
 */
export class GatewayLoader implements AsyncIterable<GatewayBatch> {
  readonly #name: string;
  readonly #chosen: ChosenGateway;
  readonly #outage: Outage;
  #connection: GatewayConnection | null = null;
  /** The connection that was asked for an epoch, which has not ended. */
  #asked: GatewayConnection | null = null;
  #inHand: GatewayBatch | null = null;
  #iterations = 0;
  #isClosed = false;
  #closing: Promise<void> | null = null;

  constructor(stream: string, options: GatewayOptions) {
    this.#name = stream;
    this.#chosen = chosenGateway(stream, options);
    this.#outage = new Outage(this.#chosen.notify, "reading", this.#chosen.timeoutMs ?? OUTAGE_MS);
  }

  /** When a batch counts as trained on. */
  get acknowledge(): "next" | "manual" {
    return this.#chosen.acknowledge;
  }

  /**
   * Connect and join the group. The first iteration does the same.
   *
   * @throws ServerUnavailable, Unauthorized, BadOption, TooLarge, or what a `Loader` throws.
   */
  async open(): Promise<GatewayFacts> {
    for (;;) {
      const connection = this.#connected();
      try {
        const { spec, info, member } = await connection.opened();
        this.#outage.over();
        return { spec, info, member };
      } catch (error) {
        await this.#bear(connection, error as Error);
      }
    }
  }

  /** Yield the batches of the group's next epoch, or of a feed. */
  async *[Symbol.asyncIterator](): AsyncGenerator<GatewayBatch, void, void> {
    this.#iterations += 1;
    const mine = this.#iterations;
    await this.#askedForNext();
    let isEmpty = true;
    for (;;) {
      const connection = this.#connected();
      try {
        await connection.opened();
        if (connection !== this.#asked) connection.send({ type: "epoch" });
        this.#asked = connection;
        const event = await connection.next();
        this.#outage.over();
        if (event.type === "end") {
          this.#asked = null;
          return;
        }
        isEmpty = false;
        const batch = new GatewayBatch(event.batch, (one) => this.#acknowledge(one, connection, event.number));
        if (this.acknowledge === "next") this.#inHand = batch;
        yield batch;
        this.#requireMine(mine);
        await this.#askedForNext();
      } catch (error) {
        if (this.#isClosed) return;
        if (error instanceof NothingCame) throw error;
        this.#requireMine(mine); // the connection is the other loop's
        // a member that joined again finds no more of an epoch that the others have ended meanwhile
        if (!isEmpty && (error instanceof GroupFinished || error instanceof WaitTimeout)) return;
        await this.#bear(connection, error as Error);
      }
    }
  }

  /**
   * Return the batches as a `tf.data.Dataset`, each iteration an epoch. It needs `acknowledge: "manual"`, and acknowledges a
   * batch after the steps that used it. See `dataset`.
   */
  dataset<T extends TfLike>(tf: T, options: DatasetOptions): DatasetOf<T> & DatasetControls {
    return dataset(this, tf, options);
  }

  /** Leave the group, and return once what was not acknowledged is back in it. */
  close(): Promise<void> {
    this.#closing ??= this.#end();
    return this.#closing;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  async #end(): Promise<void> {
    this.#isClosed = true;
    const connection = this.#connection;
    if (connection === null) return;
    await connection.close();
    const left = connection.unacknowledged;
    if (left > 0) {
      this.#chosen.notify(`${left} samples were handed out and not acknowledged: they are handed out again`);
    }
  }

  #connected(): GatewayConnection {
    if (this.#isClosed) throw new PenstockError(`this loader of '${this.#name}' is closed`);
    this.#connection ??= new GatewayConnection(this.#chosen);
    return this.#connection;
  }

  /** Wait until it is time to connect again. Raises an error that another connection would meet, too. */
  async #bear(connection: GatewayConnection, error: Error): Promise<void> {
    if (error instanceof NothingCame) throw error;
    if (connection === this.#connection) this.#connection = null;
    connection.abandon();
    if (!(error instanceof ServerUnavailable) || this.#isClosed) throw error;
    await this.#outage.bear(error);
  }

  async #askedForNext(): Promise<void> {
    const batch = this.#inHand;
    this.#inHand = null;
    await batch?.ack();
  }

  async #acknowledge(batch: GatewayBatch, connection: GatewayConnection, number: number): Promise<boolean> {
    if (batch === this.#inHand) this.#inHand = null;
    try {
      await connection.acknowledge(number, batch.size);
      return true;
    } catch (error) {
      if (this.#isClosed) throw closedBefore(this.#name, batch.size);
      if (connection === this.#connection && !(error instanceof ServerUnavailable)) throw error;
      this.#chosen.notify(
        `the connection broke before ${batch.size} samples were acknowledged: the group hands them out again`,
      );
      return false;
    }
  }

  #requireMine(iteration: number): void {
    if (iteration === this.#iterations) return;
    throw new PenstockError(
      `this loader of '${this.#name}' is read by another loop, and asking for the next batch acknowledges the one ` +
        "before: make a loader for each loop, with the same group",
    );
  }
}
