// The rule that finds an epoch of which only the manifest is left, because it was released or its opener died.

import { hashOf, type Server, textOf } from "../server/client.js";
import { integer, readable } from "./damage.js";
import { begunShards, findManifest, type Manifest } from "./manifest.js";
import { ALIVE_MS } from "./presence.js";
import { isIn, type Range } from "./ranges.js";
import { clockOf, loadRoster, type Roster } from "./roster.js";
import { readCounters, type Stream } from "./stream.js";

/** A worker that reported its rate within this time is at work. */
const REPORT_COUNTS_MS = 10_000;

/**
 * Return whether an epoch has nothing but a manifest: it was released, or its opener died before it was opened. What is
 * missing on a roster proves nothing, because the server may have lost it. Python has the same rule.
 *
 * @throws DamagedKey
 */
export async function isLeftOver(server: Server, stream: Stream, epoch: number): Promise<boolean> {
  const { released } = await readCounters(server, stream);
  const manifest = await findManifest(server, stream, epoch);
  const rosters = await Promise.all(stream.partitions.map((partition) => loadRoster(server, partition)));
  const lacking = rosters.filter(({ epochs }) => !epochs.includes(epoch));
  if (manifest === null || lacking.length === 0 || rosters.some(({ retiring }) => retiring.has(epoch))) return false;
  const notes = [...released, ...lacking.flatMap(releasesOf)];
  if (isIn(notes, epoch)) return true;
  return lacking.length === rosters.length && (await isForsaken(server, stream, manifest));
}

/** Return what a roster says of releases. Those by earlier versions leave only what groups have read. */
function releasesOf({ retired, groups }: Roster): Range[] {
  return [...retired, ...[...groups.values()].map(({ first, read }): Range => [first, read])];
}

/** Return whether nothing was written of an epoch, and no process is about to open it. */
async function isForsaken(server: Server, stream: Stream, manifest: Manifest): Promise<boolean> {
  if (manifest.state === "produced" || manifest.done.size > 0) return false;
  if (manifest.sizes === null && (await begunShards(server, stream, manifest)) > 0) return false;
  const { keys } = stream;
  const nowMs = await clockOf(server, keys.meta);
  const key = keys.manifest(manifest.epoch);
  const made = textOf(await server.call("HGET", key, "created_ms"));
  if (nowMs - readable(key, () => integer(made)) <= ALIVE_MS) return false;
  const rates = hashOf(await server.call("HGETALL", keys.rates));
  const workers = [...rates].filter(([field]) => field.startsWith("w:"));
  return readable(keys.rates, () => workers.every(([, text]) => nowMs - JSON.parse(text).seen > REPORT_COUNTS_MS));
}
