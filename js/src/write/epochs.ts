// Opens, sizes, completes and abandons epochs on the server, and registers their shards. Each command may be repeated.

import { randomBytes } from "node:crypto";
import { EpochAbandoned, EpochNotFound, ReplyError, ShardMismatch, StreamConflict } from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { announce } from "../stream/events.js";
import {
  findManifest,
  loadManifest,
  MAX_SHARDS,
  type Manifest,
  plannedSamples,
  whyNotPlanned,
} from "../stream/manifest.js";
import { isIn } from "../stream/ranges.js";
import { readCounters, requireThere, type Stream } from "../stream/stream.js";
import { MAX_NUMBER } from "../wire/limits.js";
import { deleted, requireKept } from "./streamCreation.js";

const CLOSED = /PENSTOCK (shard \d+ ended with \d+ samples)/;

/** The entries of a shard that were written while their server had no replica. */
export interface UnreplicatedWrites {
  readonly partition: number;
  /** The times of the oldest and of the newest one, by their ids. */
  readonly firstMs: number;
  readonly lastMs: number;
  readonly server: string;
}

/** How an epoch is opened. */
export interface EpochPlan {
  readonly kind?: "epoch" | "feed";
  readonly seed?: number;
  readonly fingerprint?: string;
  /** The planned samples of each shard. */
  readonly sizes?: readonly number[] | null;
}

/** The number of a new epoch is in use: the server came back with an older state. */
export class NumberTaken extends StreamConflict {
  override get name(): string {
    return "StreamConflict";
  }
}

/**
 * Open an epoch, or find it open.
 *
 * @param wanted The epoch's number, or null for the next one.
 * @param again What an earlier call returned, which the server may have lost. The epoch keeps its id.
 * @throws EpochAbandoned, EpochNotFound for a released number, StreamConflict if it exists with another plan.
 */
export async function openEpoch(
  server: Server,
  stream: Stream,
  wanted: number | null,
  { kind = "epoch", seed = 0, fingerprint = "", sizes = null }: EpochPlan = {},
  again: Manifest | null = null,
): Promise<Manifest> {
  const { keys } = stream;
  if (wanted !== null && !(wanted >= 0 && wanted < MAX_NUMBER)) {
    throw new EpochNotFound(`epoch ${wanted}: epochs are numbered from 0`);
  }
  const epoch = await reserveNumber(server, stream, wanted);
  const key = keys.manifest(epoch);
  const id = again?.id ?? randomBytes(8).toString("hex");
  // one step begins a manifest with all of its fields, also if several writers begin it
  const fields = ["id", id, ...firstFields(kind, seed, fingerprint)];
  const begun = await server.run(
    "begin_manifest",
    [keys.meta, key, keys.epochs],
    [stream.id, epoch, "open", ...fields],
  );
  if (Number(begun) < 0) throw await deleted(server, stream);
  if (Number(begun) < 1) throw await wasReleased(server, stream, epoch);
  const manifest = await loadManifest(server, stream, epoch);
  const isBegunHere = manifest.id === id;
  if ((wanted === null || again !== null) && !isBegunHere) throw givenTwice(stream, epoch, "another writer opened it");
  if (manifest.state === "abandoned") {
    throw new EpochAbandoned(`epoch ${epoch} of '${stream.name}' was abandoned: it takes no more samples`);
  }
  if (fingerprint !== "") await requireShared(server, stream, manifest, { kind, seed: String(seed), fingerprint });
  await register(server, stream, manifest, isBegunHere);
  await announce(server, keys, "open", epoch);
  if (sizes !== null) await sizeEpoch(server, stream, manifest, sizes);
  return await loadManifest(server, stream, epoch);
}

/** Begin the epoch of this number if it is still the next one, else return null. `openEpoch` makes its keys. */
export async function beginNextEpoch(
  server: Server,
  stream: Stream,
  epoch: number,
  kind: "epoch" | "feed",
): Promise<Manifest | null> {
  const { keys } = stream;
  const begun = await server.run(
    "begin_next_epoch",
    [keys.meta, keys.manifest(epoch), keys.epochs],
    [stream.id, epoch, randomBytes(8).toString("hex"), "open", ...firstFields(kind)],
  );
  if (Number(begun) < 0) throw await deleted(server, stream);
  return Number(begun) ? await loadManifest(server, stream, epoch) : null;
}

/** Return names and values of a new manifest's fields, without its id. */
function firstFields(kind: string, seed = 0, fingerprint = ""): (string | number)[] {
  const fields = ["kind", kind, "seed", seed, "fingerprint", fingerprint, "done", 0];
  return [...fields, "created_ms", Date.now(), "state", "open"];
}

/** Register an epoch again where a server lost it. Raises EpochNotFound if it was released. */
export async function openAgain(server: Server, stream: Stream, manifest: Manifest): Promise<void> {
  await register(server, stream, manifest, false);
}

async function requireShared(
  server: Server,
  { name, keys }: Stream,
  { epoch }: Manifest,
  ours: Readonly<Record<string, string>>,
): Promise<void> {
  const names = Object.keys(ours);
  const reply = (await server.call("HMGET", keys.manifest(epoch), ...names)) as unknown[];
  const differ = names.flatMap((what, at) => {
    const its = textOf(reply[at]);
    return its === ours[what] ? [] : [`its ${what} is ${its}, not ${ours[what]}`];
  });
  if (differ.length === 0) return;
  throw new StreamConflict(
    `epoch ${epoch} of '${name}' belongs to another production: ${differ.join(" and ")}; give this one another stream ` +
      "name, or start both with the same source and options",
  );
}

function givenTwice({ name }: Stream, epoch: number, why: string): NumberTaken {
  return new NumberTaken(
    `epoch number ${epoch} of '${name}' was given out twice (${why}): the server came back without its newest writes; ` +
      "start again, with the next number",
  );
}

/** Make the epoch's keys in every partition, or none if it was released since the manifest was read. */
async function register(server: Server, stream: Stream, { epoch, id }: Manifest, isBegunHere: boolean): Promise<void> {
  const { keys, partitions } = stream;
  const made = partitions.map((one) => [one.roster, one.state(epoch), one.entries(epoch)]);
  const undo = () => Promise.all(made.map((names) => server.run("undo_open_epoch", names, [epoch, id])));
  let isWhole: boolean;
  try {
    isWhole = (await Promise.all(made.map((names) => server.run("open_epoch", names, [epoch, id])))).every(Boolean);
  } catch (error) {
    if (!isScriptError(error, "epoch has another manifest")) throw error;
    if (isBegunHere) {
      await undo();
      await server.run("forget_manifest", [keys.manifest(epoch), keys.epochs], [id, epoch]);
    }
    throw givenTwice(stream, epoch, "a partition has it under another manifest");
  }
  await requireKept(server, stream, [keys.manifest(epoch), keys.epochs, ...made.flat()]);
  const isThere = (await findManifest(server, stream, epoch))?.id === id;
  if (isWhole && isThere) return;
  if (!isThere) await undo(); // else the release is under way, and removes all of it
  throw await wasReleased(server, stream, epoch);
}

async function reserveNumber(server: Server, stream: Stream, wanted: number | null): Promise<number> {
  const epoch = Number(await server.run("reserve_epoch", [stream.keys.meta], [stream.id, wanted ?? ""]));
  if (epoch < 0) throw await deleted(server, stream);
  if (await isReleased(server, stream, epoch)) throw await wasReleased(server, stream, epoch);
  return epoch;
}

/** Return whether the epoch existed and was released. Raises DamagedKey. */
export async function isReleased(server: Server, stream: Stream, epoch: number): Promise<boolean> {
  return isIn((await readCounters(server, stream)).released, epoch);
}

async function wasReleased(server: Server, stream: Stream, epoch: number): Promise<EpochNotFound> {
  const { name } = stream;
  await requireThere(server, stream);
  const { next } = await readCounters(server, stream);
  if (next > epoch) return new EpochNotFound(`epoch ${epoch} of '${name}' was released; the next is ${next}`);
  return new EpochNotFound(
    `epoch ${epoch} of '${name}' is gone: the server came back without its newest writes; start again`,
  );
}

/** Fix shards and sizes. Raises StreamConflict if the epoch has other sizes. */
export async function sizeEpoch(
  server: Server,
  stream: Stream,
  { epoch, id }: Manifest,
  sizes: readonly number[],
): Promise<void> {
  const why = whyNotPlanned(sizes);
  if (why !== null) throw new StreamConflict(why);
  await progress(server, stream, "size_epoch", epoch, [id, epoch, sizes.length, `[${sizes.join(", ")}]`]);
  const found = await loadManifest(server, stream, epoch);
  if (found.sizes === null || String(found.sizes) === String(sizes)) return;
  const samples = sizes.reduce((sum, size) => sum + size, 0);
  throw new StreamConflict(
    `epoch ${epoch} of '${stream.name}' is planned with ${plannedSamples(found)} samples in ${found.sizes.length} ` +
      `shards, this source has ${samples} in ${sizes.length}: the source or its sizes changed`,
  );
}

/** Record that a shard is complete. The last shard makes the epoch produced. */
export async function finishShard(
  server: Server,
  stream: Stream,
  { epoch, id }: Manifest,
  shard: number,
  size: number,
  unreplicated: UnreplicatedWrites | null,
): Promise<void> {
  await progress(server, stream, "finish_shard", epoch, [id, epoch, shard, size, ...noteOf(unreplicated)]);
}

/** End a writer's shard of a feed and seal the epoch, which is produced once all its writers have done so. */
export async function finishFeedShard(
  server: Server,
  stream: Stream,
  { epoch, id }: Manifest,
  shard: number,
  size: number,
  unreplicated: UnreplicatedWrites | null,
): Promise<void> {
  await progress(server, stream, "finish_feed_shard", epoch, [id, epoch, shard, size, ...noteOf(unreplicated)]);
}

function noteOf(unreplicated: UnreplicatedWrites | null): (string | number)[] {
  if (unreplicated === null) return [];
  const { partition, firstMs, lastMs, server } = unreplicated;
  return [partition, firstMs, lastMs, server];
}

async function progress(
  server: Server,
  stream: Stream,
  script: string,
  epoch: number,
  args: readonly (string | number)[],
): Promise<void> {
  const { keys } = stream;
  try {
    await server.run(script, [keys.manifest(epoch), keys.events, keys.epochs], args);
  } catch (error) {
    const [, closed] = (error instanceof ReplyError && CLOSED.exec(error.message)) || [];
    if (closed !== undefined) {
      throw new ShardMismatch(
        `${closed} of epoch ${epoch} of '${stream.name}', because another writer of the epoch or \`penstock epochs ` +
          "close` closed it before this writer had stopped; what it wrote after those is not part of the epoch: write it " +
          "into the next one",
      );
    }
    if (!isScriptError(error, "epoch has another manifest")) throw error;
    await requireThere(server, stream);
    throw new EpochAbandoned(
      `epoch ${epoch} of '${stream.name}' was released, or removed and made again by another writer: start again`,
    );
  }
}

/** Register a shard that its writer chose by number in an open epoch. Raises StreamConflict. */
export async function reserveShard(server: Server, stream: Stream, manifest: Manifest, shard: number): Promise<void> {
  if (!(shard >= 0 && shard < MAX_SHARDS)) {
    throw new StreamConflict(`shard ${shard}: shards are numbered from 0 to ${MAX_SHARDS - 1}`);
  }
  await server.run("reserve_shard", [stream.keys.manifest(manifest.epoch)], [manifest.id, shard]);
}

/** Declare that an epoch will not be completed: in the partitions first, so that no late write is accepted. */
export async function abandonEpoch(server: Server, stream: Stream, { epoch, id }: Manifest): Promise<void> {
  const { keys, partitions } = stream;
  const found = await findManifest(server, stream, epoch);
  if (found?.id !== id) return await requireThere(server, stream);
  for (const partition of partitions) await server.call("SET", partition.state(epoch), `abandoned:${id}`, "XX");
  await server.run("abandon_manifest", [keys.manifest(epoch), keys.epochs, keys.meta], [id, epoch, stream.id]);
  await requireThere(server, stream);
  await announce(server, keys, "abandoned", epoch);
}

/** Return whether a script ended with an error of its own. */
export function isScriptError(error: unknown, words: string): boolean {
  return error instanceof ReplyError && error.message.includes(`PENSTOCK ${words}`);
}
