// Manifests: the plan of an epoch and its progress, and the limits of shards and samples. States: `open -> sized ->
// produced`, or `abandoned`.

import { EpochNotFound } from "../errors.js";
import { hashOf, type Server, textOf } from "../server/client.js";
import { MAX_SHARD_SAMPLES } from "../wire/limits.js";
import { integer, readable } from "./damage.js";
import { requireThere, type Stream } from "./stream.js";

export const MAX_SHARDS = 2 ** 20;
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

/** Return the current manifest, read in full only if something that readers use has changed. Raises EpochNotFound. */
export async function renewed(server: Server, stream: Stream, manifest: Manifest): Promise<Manifest> {
  const key = stream.keys.manifest(manifest.epoch);
  const [id, state, done] = ((await server.call("HMGET", key, "id", "state", "done")) as unknown[]).map(textOf);
  const isSame = id === manifest.id && state === manifest.state;
  if (isSame && (manifest.sizes !== null || done === String(manifest.done.size))) return manifest;
  return await loadManifest(server, stream, manifest.epoch);
}

/** Return epoch to manifest state of all retained epochs, ascending. Raises DamagedKey. */
export async function retainedEpochs(server: Server, stream: Stream): Promise<Map<number, EpochState>> {
  return statesOf(stream, await server.call("HGETALL", stream.keys.epochs));
}

/** Return the same, of the contents of the epochs key. */
export function statesOf(stream: Stream, reply: unknown): Map<number, EpochState> {
  return readable(stream.keys.epochs, () => {
    const found = [...hashOf(reply)].map(([epoch, state]) => [integer(epoch), state as EpochState] as const);
    return new Map(found.sort(([a], [b]) => a - b));
  });
}

/** Return how many shards may have samples: the planned ones or, in an open epoch, those that were taken. */
export async function begunShards(server: Server, stream: Stream, manifest: Manifest): Promise<number> {
  if (manifest.sizes !== null) return manifest.sizes.length;
  const key = stream.keys.manifest(manifest.epoch);
  const found = textOf(await server.call("HGET", key, "next_shard"));
  return readable(key, () => {
    const next = found === null ? 0 : integer(found);
    if (next < 0 || next > MAX_SHARDS) throw new RangeError(`next_shard is ${next}`);
    return Math.max(next, shardCount(manifest));
  });
}

/** Return whether no more samples will come. */
export function isEnded({ state }: Manifest): boolean {
  return state === "produced" || state === "abandoned";
}

/** Return the planned samples, with holes, or null while the epoch is open. */
export function plannedSamples({ sizes }: Manifest): number | null {
  return sizes === null ? null : sizes.reduce((sum, size) => sum + size, 0);
}

/** Return the value of each partition's state key while the epoch may be written and acknowledged. */
export function liveState({ id }: Manifest): string {
  return `live:${id}`;
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
