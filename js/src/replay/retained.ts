// A retained epoch for readers without a group: the lease that keeps it, and its index records in canonical order.

import { randomBytes } from "node:crypto";
import { EpochIncomplete, ReplayTruncated, ServerUnavailable } from "../errors.js";
import type { Server } from "../server/client.js";
import { type IndexRecord, indexRecords } from "../stream/indexRecords.js";
import { loadManifest, type Manifest, shardCount, shardSize } from "../stream/manifest.js";
import { loadRoster } from "../stream/roster.js";
import { partitionOf, requireThere, type Stream } from "../stream/stream.js";

const RENEWALS_PER_LEASE = 10;

/** An index record and the shard that it belongs to. */
export interface PlacedRecord {
  readonly shard: number;
  readonly record: IndexRecord;
}

/** One produced epoch, which a lease on the roster keeps while it is read. */
export class RetainedEpoch {
  readonly manifest: Manifest;
  /** The number of samples, without holes. */
  samples = 0;
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #leaseMs: number;
  readonly #token = randomBytes(8).toString("hex");
  #timer: NodeJS.Timeout | undefined;
  #renewed = Date.now();
  #lost: Error | null = null;

  private constructor(server: Server, stream: Stream, manifest: Manifest, leaseMs: number) {
    this.#server = server;
    this.#stream = stream;
    this.manifest = manifest;
    this.#leaseMs = leaseMs;
  }

  /** Take the lease. Raises EpochNotFound, EpochIncomplete, or ReplayTruncated if parts of the epoch were removed. */
  static async take(server: Server, stream: Stream, epoch: number, leaseMs: number): Promise<RetainedEpoch> {
    const manifest = await loadManifest(server, stream, epoch);
    if (manifest.state !== "produced") {
      throw new EpochIncomplete(
        `epoch ${epoch} of '${stream.name}' is ${manifest.state}: replay reads produced epochs; read it with a group`,
      );
    }
    const retained = new RetainedEpoch(server, stream, manifest, leaseMs);
    await retained.#ask(0);
    try {
      for await (const { record } of retained.records()) retained.samples += record.count;
    } catch (error) {
      await retained.letGo();
      throw error;
    }
    retained.#timer = setInterval(() => void retained.#renew(), leaseMs / RENEWALS_PER_LEASE);
    retained.#timer.unref();
    return retained;
  }

  /** Yield the records of all shards in canonical order. Raises ReplayTruncated if one is missing. */
  async *records(server = this.#server): AsyncGenerator<PlacedRecord> {
    const { epoch } = this.manifest;
    for (let shard = 0; shard < shardCount(this.manifest); shard += 1) {
      let end = 0;
      const size = shardSize(this.manifest, shard);
      for await (const record of indexRecords(server, partitionOf(this.#stream, shard), epoch, shard)) {
        if (record.first >= size) break; // of a writer that went on after the epoch was closed
        if (record.first !== end) {
          throw new ReplayTruncated(
            `shard ${shard} of epoch ${epoch} has no record of offsets ${end}-${record.first - 1}`,
          );
        }
        end = record.end;
        yield { shard, record };
      }
      if (end !== size) {
        throw new ReplayTruncated(`shard ${shard} of epoch ${epoch} ends at ${end}, planned are ${size}`);
      }
    }
  }

  /** Return the error for an entry that was removed, or the one that says why the whole stream is lost. */
  async truncated(record: IndexRecord): Promise<Error> {
    const { name, partitions } = this.#stream;
    const { epoch } = this.manifest;
    let isTrimmed = false;
    try {
      await requireThere(this.#server, this.#stream);
      // retention marks the epoch on the roster before it removes anything
      for (const partition of partitions) isTrimmed ||= (await loadRoster(this.#server, partition)).trimmed.has(epoch);
    } catch (error) {
      return error as Error;
    }
    const how = isTrimmed
      ? "removed (retention needs its bytes); replay a later epoch, or give the stream a larger budget. If another " +
        `program deleted it, \`penstock audit ${name}\` says so`
      : "deleted, and not by retention: another program deleted it, or the server lost it; " +
        `\`penstock audit ${name}\` names all that is missing, and \`penstock audit ${name} --repair SOURCE...\` ` +
        "makes it again";
    return new ReplayTruncated(`epoch ${epoch} of '${name}' is no longer whole: entry ${record.entryId} was ${how}`);
  }

  /** Raise the error that ended the lease, if it ended. */
  raiseLost(): void {
    if (this.#lost !== null) throw this.#lost;
  }

  /** End the lease. */
  async letGo(): Promise<void> {
    clearInterval(this.#timer);
    await Promise.all(
      this.#stream.partitions.map(({ roster }) => this.#server.call("HDEL", roster, `r:${this.#token}`)),
    );
  }

  async #ask(isRenewal: 0 | 1): Promise<void> {
    const args = [this.#token, this.manifest.epoch, this.#leaseMs, isRenewal];
    for (const { roster } of this.#stream.partitions) {
      if (await this.#server.run("lease_replay", [roster], args)) continue;
      await requireThere(this.#server, this.#stream);
      throw new ReplayTruncated(
        `this replay's lease on epoch ${this.manifest.epoch} of '${this.#stream.name}' lapsed: it renewed nothing for ` +
          `${this.#leaseMs / 1000} s, and retention may have removed entries; replay it again if it is still there, ` +
          "with a longer leaseMs, or pin it (`penstock epochs pin`)",
      );
    }
    this.#renewed = Date.now();
  }

  async #renew(): Promise<void> {
    try {
      await this.#ask(1);
    } catch (error) {
      if (error instanceof ServerUnavailable && Date.now() - this.#renewed < this.#leaseMs) return;
      this.#lost ??= error as Error;
      clearInterval(this.#timer);
    }
  }
}
