// Feeds: epochs without a plan, whose writers take shards as they come. The first writer that goes on to the next epoch
// seals this one, and the last one that finishes sizes it.

import { randomBytes } from "node:crypto";
import type { Server } from "../server/client.js";
import { findManifest, type Manifest, retainedEpochs } from "../stream/manifest.js";
import { readCounters, type Stream } from "../stream/stream.js";
import { beginNextEpoch, NumberTaken, openEpoch } from "./epochs.js";

/** A shard of a feed that a writer took. */
export interface FeedShard {
  readonly manifest: Manifest;
  readonly shard: number;
  /** The manifest maps it to the shard, and each index record of the writer repeats it. */
  readonly token: string;
}

/** Take a shard of an open, unsealed epoch of the feed. Opens the next epoch if there is none. */
export async function joinFeed(server: Server, stream: Stream): Promise<FeedShard> {
  for (;;) {
    const { next } = await readCounters(server, stream); // before the look: what is opened later has a higher number
    for (const [epoch, state] of await retainedEpochs(server, stream)) {
      if (state !== "open") continue;
      const found = await findManifest(server, stream, epoch);
      if (found?.kind !== "feed") continue;
      const manifest = await openEpoch(server, stream, epoch, { kind: "feed" }); // its opener may have died half-way
      const taken = await takeShard(server, stream, manifest);
      if (taken !== null) return taken;
    }
    const begun = await beginNextEpoch(server, stream, next, "feed"); // null if another writer was faster
    if (begun === null) continue;
    try {
      const opened = await openEpoch(server, stream, next, { kind: "feed" }, begun);
      const taken = await takeShard(server, stream, opened);
      if (taken !== null) return taken;
    } catch (error) {
      if (!(error instanceof NumberTaken)) throw error;
    }
  }
}

/** Take the next shard of an open epoch, or return null once it is sealed. A call that is repeated gets the same one. */
async function takeShard(server: Server, stream: Stream, manifest: Manifest): Promise<FeedShard | null> {
  const token = randomBytes(6).toString("hex");
  const shard = Number(await server.run("take_shard", [stream.keys.manifest(manifest.epoch)], [token, manifest.id]));
  return shard >= 0 ? { manifest, shard, token } : null;
}

/** Register a writer's shard again at a server that may have forgotten it. False if the epoch takes it no more. */
export async function retakeShard(
  server: Server,
  stream: Stream,
  { manifest, shard, token }: FeedShard,
): Promise<boolean> {
  const keys = [stream.keys.manifest(manifest.epoch)];
  return Boolean(await server.run("retake_shard", keys, [manifest.id, token, shard]));
}

/** Return whether the epoch's writers should finish their shards and go on to the next epoch. */
export async function isSealed(server: Server, { keys }: Stream, epoch: number): Promise<boolean> {
  return Boolean(await server.call("HEXISTS", keys.manifest(epoch), "sealed"));
}
