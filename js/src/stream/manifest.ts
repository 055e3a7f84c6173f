import { EpochNotFound } from "../errors.js";
import { hashOf, type Server } from "../server/server.js";
import { MAX_SHARD_SAMPLES } from "../wire/limits.js";
import { integer, readable, requireThere, type Stream } from "./stream.js";

const MAX_SHARDS = 2 ** 20;
const MAX_EPOCH_SAMPLES = 2 ** 33;

export type EpochState = "open" | "sized" | "produced" | "abandoned";

/** The plan of one epoch, and its complete shards. */
export interface Manifest {
  readonly epoch: number;
  readonly id: string;
  readonly state: EpochState;
  readonly kind: string;
  /** The planned samples of each shard. Null while the epoch is open. */
  readonly sizes: readonly number[] | null;
  /** Complete shard to its size. */
  readonly done: ReadonlyMap<number, number>;
}

/** Return the manifest, or null if there is no such epoch. Raises DamagedKey. */
export async function findManifest(server: Server, stream: Stream, epoch: number): Promise<Manifest | null> {
  const key = stream.keys.manifest(epoch);
  const found = hashOf(await server.call("HGETALL", key));
  if (!found.has("id")) return null;
  return readable(key, () => ({
    epoch,
    id: found.get("id") as string,
    state: found.get("state") as EpochState,
    kind: found.get("kind") ?? "epoch",
    sizes: found.has("sizes") ? sizesOf(found.get("sizes") as string) : null,
    done: doneOf(found),
  }));
}

/** Return the manifest. Raises EpochNotFound, which names the retained epochs. */
export async function loadManifest(server: Server, stream: Stream, epoch: number): Promise<Manifest> {
  const manifest = await findManifest(server, stream, epoch);
  if (manifest !== null) return manifest;
  await requireThere(server, stream);
  const epochs = [...hashOf(await server.call("HGETALL", stream.keys.epochs)).keys()];
  const there = epochs.sort((a, b) => Number(a) - Number(b)).join(", ") || "none";
  throw new EpochNotFound(`stream '${stream.name}' has no epoch ${epoch}; retained epochs: ${there}`);
}

/** Return the number of known shards: all once the epoch is sized, else up to the last complete one. */
export function shardCount(manifest: Manifest): number {
  return manifest.sizes?.length ?? Math.max(-1, ...manifest.done.keys()) + 1;
}

/** Return the upper bound of a shard's offsets. */
export function shardSize(manifest: Manifest, shard: number): number {
  if (manifest.sizes === null) return manifest.done.get(shard) ?? MAX_SHARD_SAMPLES;
  return manifest.sizes[shard] ?? 0;
}

function sizesOf(text: string): number[] {
  if (text.length > MAX_SHARDS * 9) throw new RangeError(`sizes has ${text.length} bytes`);
  const sizes = JSON.parse(text);
  if (!Array.isArray(sizes)) throw new RangeError("sizes is no list of numbers");
  const why = whyNotPlanned(sizes);
  if (why !== null) throw new RangeError(why);
  return sizes;
}

function doneOf(fields: ReadonlyMap<string, string>): Map<number, number> {
  const done = new Map<number, number>();
  for (const [field, text] of fields) {
    if (!field.startsWith("d:")) continue;
    const [shard, size] = [integer(field.slice(2)), integer(text)];
    if (shard < 0 || shard >= MAX_SHARDS || size < 0 || size > MAX_SHARD_SAMPLES) {
      throw new RangeError(`d:${shard} says ${size}`);
    }
    done.set(shard, size);
  }
  return done;
}

/** Return why an epoch cannot have shards of these sizes, or null if it can. */
export function whyNotPlanned(sizes: readonly unknown[]): string | null {
  if (sizes.length > MAX_SHARDS) return `an epoch has at most ${MAX_SHARDS} shards, planned are ${sizes.length}`;
  let samples = 0;
  for (const size of sizes) {
    if (!Number.isSafeInteger(size) || (size as number) < 0 || (size as number) > MAX_SHARD_SAMPLES) {
      return `a shard holds at most ${MAX_SHARD_SAMPLES} samples, planned are ${String(size)}`;
    }
    samples += size as number;
  }
  return samples > MAX_EPOCH_SAMPLES
    ? `an epoch holds at most ${MAX_EPOCH_SAMPLES} samples, planned are ${samples}`
    : null;
}
