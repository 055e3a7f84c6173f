// The part of a writer that its epochs use, too: opening a shard, taking the feed's next shard, fixing the spec, and
// waiting for replicas.

import { PenstockError, ShardMismatch } from "../errors.js";
import { Confirmer } from "../stream/confirmed.js";
import type { Manifest } from "../stream/manifest.js";
import { loadStream, partitionOf } from "../stream/stream.js";
import { MAX_SHARD_SAMPLES } from "../wire/limits.js";
import type { Spec } from "../wire/spec.js";
import { placeOf } from "./admission.js";
import { Committer } from "./commit.js";
import type { WriterContext } from "./context.js";
import { finishFeedShard, finishShard, reserveShard } from "./epochs.js";
import { type FeedShard, joinFeed, retakeShard } from "./feed.js";
import { largestBlock } from "./quota.js";
import { type ShardSlot, ShardWriter } from "./shard.js";
import { rowsOf, toldSpec } from "./spec.js";
import { fixSpec } from "./streamCreation.js";

/** What a writer and its epochs share: the stream, its spec, and how a shard is opened. */
export class WriterCore {
  #context: WriterContext;
  isClosed = false;

  constructor(context: WriterContext) {
    this.#context = context;
  }

  get stream(): WriterContext["stream"] {
    return this.#context.stream;
  }

  get control(): WriterContext["control"] {
    return this.#context.control;
  }

  get notify(): WriterContext["notify"] {
    return this.#context.notify;
  }

  /** The part of the budget that each partition has. */
  get partitionBudget(): number {
    return Math.floor(this.stream.budgetBytes / this.stream.partitions.length);
  }

  requireOpen(): void {
    if (this.isClosed) throw new PenstockError(`this writer of '${this.stream.name}' is closed: open another`);
  }

  /** Return the stream's spec. If it has none, take it from a first sample, say so, and store it. */
  async requireSpec(infer: () => Spec): Promise<Spec> {
    if (this.stream.spec === null) await this.#reload();
    if (this.stream.spec === null) {
      const found = infer();
      const spec = await fixSpec(this.control, this.stream, found);
      const rows = rowsOf(found);
      const hint =
        rows === 0
          ? ""
          : `; if its ${rows} rows are ${rows} samples, \`penstock delete\` the stream and write them with writeBatch()`;
      this.notify(`the spec of '${this.stream.name}' is taken from its first sample: ${toldSpec(spec)}${hint}`);
      await this.#reload();
    }
    return this.stream.spec as Spec;
  }

  async #reload(): Promise<void> {
    this.#context = { ...this.#context, stream: await loadStream(this.control, this.stream.name) };
  }

  /** Write facts of the stream's own keys, again after a failover, and return once replicas have them. */
  async onReplicas<T>(write: () => Promise<T>): Promise<T> {
    return await this.#confirmer().run([this.stream.keys.meta], write);
  }

  /** Do the same with facts of every partition, too. */
  async onAllReplicas<T>(write: () => Promise<T>): Promise<T> {
    const { keys, partitions } = this.stream;
    return await this.#confirmer().run([keys.meta, ...partitions.map(({ roster }) => roster)], write);
  }

  /** Return the writer of one shard, at its progress. The stream must have a spec. */
  async openShard(manifest: Manifest, shard: number, most = MAX_SHARD_SAMPLES): Promise<ShardWriter> {
    this.requireOpen();
    const { sizes, epoch } = manifest;
    if (!Number.isSafeInteger(shard) || shard < 0) throw new ShardMismatch(`shard ${shard}: shards count from 0`);
    if (sizes !== null && shard >= sizes.length) {
      throw new ShardMismatch(`epoch ${epoch} is planned in ${sizes.length} shards, found ${shard}`);
    }
    if (sizes === null) await reserveShard(this.control, this.stream, manifest, shard);
    const committer = await Committer.begin(this.#context, placeOf(this.stream, manifest, shard));
    const finish = async (size: number) => {
      const { unreplicated } = committer;
      await this.onReplicas(() => finishShard(this.control, this.stream, manifest, shard, size, unreplicated));
      this.#context.order.end(epoch, shard);
    };
    return this.#writerOf({ committer, shard, finish }, sizes?.[shard] ?? most, sizes !== null, null);
  }

  /** Take the next shard of the feed. */
  async openFeed(): Promise<{ readonly epoch: () => number; readonly shard: ShardWriter }> {
    let epoch = 0;
    const take = async (): Promise<ShardSlot> => {
      const taken = await this.#takeFeedShard();
      const { manifest, shard, token } = taken;
      const place = placeOf(this.stream, manifest, shard);
      const retake = () => retakeShard(this.#context.server, this.stream, taken);
      const committer = await Committer.begin(this.#context, place, token, retake);
      epoch = manifest.epoch;
      const finish = async (size: number) => {
        const { unreplicated } = committer;
        await this.onReplicas(() => finishFeedShard(this.control, this.stream, manifest, shard, size, unreplicated));
      };
      return { committer, shard, finish };
    };
    const takeAnother = async () => {
      const slot = await take();
      this.notify(
        `the server of '${this.stream.name}' came back from before this writer took its shard, and another writer has ` +
          `that now: this one goes on in shard ${slot.shard} of epoch ${epoch}`,
      );
      return slot;
    };
    const shard = this.#writerOf(await take(), MAX_SHARD_SAMPLES, false, takeAnother);
    return { epoch: () => epoch, shard };
  }

  /** Take the next shard of the feed, for good where another server has its blocks. One server would lose both. */
  async #takeFeedShard(): Promise<FeedShard> {
    const { control, stream } = this;
    const { meta } = stream.keys;
    for (;;) {
      const taken = await joinFeed(control, stream);
      const { roster } = partitionOf(stream, taken.shard);
      if (control.placeOf(roster) === control.placeOf(meta)) return taken;
      if (await this.#confirmer().run([meta], () => retakeShard(control, stream, taken))) return taken;
    }
  }

  #confirmer(): Confirmer {
    const { server, stream, notify, replicas } = this.#context;
    return new Confirmer(server, stream, notify, { watch: replicas });
  }

  #writerOf(
    slot: ShardSlot,
    limit: number,
    isPlanned: boolean,
    takeAnother: (() => Promise<ShardSlot>) | null,
  ): ShardWriter {
    const blockBytes = Math.min(this.stream.blockBytes, largestBlock(this.partitionBudget));
    const spec = this.stream.spec as Spec;
    return new ShardWriter(slot, {
      spec,
      blockBytes,
      limit,
      isPlanned,
      takeAnother,
      lost: (count) => this.#lost(count),
    });
  }

  #lost(count: number): void {
    this.notify(
      `${count} sample${count > 1 ? "s" : ""} of '${this.stream.name}' may be lost, because nothing closed the epoch or ` +
        "its writer: await close() of both",
    );
  }
}
