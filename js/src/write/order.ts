// The order of admission: which shard may use the reserve of a budget, namely the lowest unfinished one of the oldest
// unfinished epoch.

import { type Server, textOf } from "../server/client.js";
import { begunShards, type EpochState, findManifest, retainedEpochs } from "../stream/manifest.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import { now } from "../waiting.js";

const LOOK_EVERY_MS = 100;
/** Shards that one command asks about. */
const SHARDS_ASKED = 64;
/** Pairs of epoch and partition for which the complete shards are remembered. */
const EPOCHS_KNOWN = 1000;

/**
 * The order of admission as one writer knows it. The last quarter of a budget is for the lowest unfinished shard of the
 * oldest unfinished epoch. What is known to be complete is remembered, because each of many small shards asks.
 */
export class AdmissionOrder {
  readonly #server: Server;
  readonly #stream: Stream;
  /** `epoch:partition` to a shard before which all shards of the partition are complete. */
  readonly #complete = new Map<string, number>();
  #states: ReadonlyMap<number, EpochState> = new Map();
  #askedAt = Number.NEGATIVE_INFINITY;

  constructor(server: Server, stream: Stream) {
    this.#server = server;
    this.#stream = stream;
  }

  /** Return whether no earlier shard of its partition, in this or an older epoch, is unfinished. */
  async isNext(epoch: number, shard: number): Promise<boolean> {
    if (await this.#isOlderUnfinished(epoch, partitionOf(this.#stream, shard).number)) return false;
    const first = await this.#firstUnfinished(epoch, this.#firstOpen(epoch, shard), shard);
    this.#note(epoch, first ?? shard);
    return first === null;
  }

  /** Record that this writer completed the shard. */
  end(epoch: number, shard: number): void {
    if (this.#firstOpen(epoch, shard) === shard) this.#note(epoch, shard + this.#stream.partitions.length);
  }

  async #isOlderUnfinished(epoch: number, partition: number): Promise<boolean> {
    if (now() - this.#askedAt >= LOOK_EVERY_MS) {
      this.#states = await retainedEpochs(this.#server, this.#stream);
      this.#askedAt = now();
    }
    for (const [older, state] of this.#states) {
      if (older >= epoch) break;
      if (state === "produced" || state === "abandoned") continue;
      const manifest = await findManifest(this.#server, this.#stream, older);
      if (manifest === null) continue;
      const begun = await begunShards(this.#server, this.#stream, manifest);
      for (let shard = partition; shard < begun; shard += this.#stream.partitions.length) {
        if (!manifest.done.has(shard)) return true;
      }
    }
    return false;
  }

  async #firstUnfinished(epoch: number, from: number, end: number): Promise<number | null> {
    const shards: number[] = [];
    for (let shard = from; shard < end; shard += this.#stream.partitions.length) shards.push(shard);
    for (let at = 0; at < shards.length; at += SHARDS_ASKED) {
      const asked = shards.slice(at, at + SHARDS_ASKED);
      const key = this.#stream.keys.manifest(epoch);
      const sizes = (await this.#server.call("HMGET", key, ...asked.map((shard) => `d:${shard}`))) as unknown[];
      const missing = sizes.findIndex((size) => textOf(size) === null);
      if (missing >= 0) return asked[missing] as number;
    }
    return null;
  }

  #firstOpen(epoch: number, shard: number): number {
    const { number } = partitionOf(this.#stream, shard);
    return this.#complete.get(`${epoch}:${number}`) ?? number;
  }

  #note(epoch: number, shard: number): void {
    const place = `${epoch}:${partitionOf(this.#stream, shard).number}`;
    if (!this.#complete.has(place) && this.#complete.size >= EPOCHS_KNOWN) this.#complete.clear();
    this.#complete.set(place, shard);
  }
}
