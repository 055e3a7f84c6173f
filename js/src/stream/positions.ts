// The positions of an ordered group's ranks: reporting one, reading them, and taking a rank back. They count planned
// samples of an epoch, with holes: shards in order, offsets in order. They are in the first partition alone, so a
// report is one step.

import { GroupNotFound, MemberReplaced, type PenstockError, ReplayTruncated, ReplyError } from "../errors.js";
import { type Argument, hashOf, type Server, textOf } from "../server/client.js";
import { integer, readable } from "./damage.js";
import type { PartitionKeys } from "./keys.js";
import { liveState, type Manifest, shardSize } from "./manifest.js";
import { type Membership, type Order, rejoin } from "./roster.js";
import type { Stream } from "./stream.js";

/** One step that a padded last step may need, and one more to find good samples in place of bad ones. */
export const HEAD_STEPS = 2;

/** The positions of a group in one epoch. */
export interface Positions {
  /** The position of ranks that have reported none. */
  readonly floor: number;
  readonly ranks: ReadonlyMap<number, number>;
}

/** Return the position of a rank: it is done with every batch below it. */
export function positionOf({ floor, ranks }: Positions, rank: number): number {
  return ranks.get(rank) ?? floor;
}

/** Return the position below which all ranks are done. */
export function lowestPosition(positions: Positions, world: number): number {
  if (world === 0) return positions.floor;
  return Math.min(...Array.from({ length: world }, (_, rank) => positionOf(positions, rank)));
}

/** Return the position of each rank. Raises DamagedKey. */
export async function knownPositions(server: Server, stream: Stream, epoch: number, group: string): Promise<Positions> {
  const key = begin(stream).positions(epoch, group);
  const fields = hashOf(await server.call("HGETALL", key));
  return readable(key, () => {
    const ranks = new Map<number, number>();
    for (const [name, value] of fields) if (name !== "floor") ranks.set(integer(name), integer(value));
    const floor = integer(fields.get("floor") ?? "0");
    if (Math.min(floor, ...ranks.keys(), ...ranks.values()) < 0)
      throw new RangeError("a rank or a position is below 0");
    return { floor, ranks };
  });
}

/** Return the position of each shard's first sample. In an open epoch only that after finished shards is known. */
export function startsOf(manifest: Manifest, shards: number): number[] {
  const starts: number[] = [];
  let at = 0;
  for (let shard = 0; shard < shards; shard += 1) {
    starts.push(at);
    if (manifest.sizes === null && !manifest.done.has(shard)) break;
    at += shardSize(manifest, shard);
  }
  return starts;
}

/** Return keys and arguments of the script that reports a position. It may run twice. */
export function positionReport(who: Membership, manifest: Manifest, position: number): [string[], Argument[]] {
  return argumentsOf(begin(who.stream), who, manifest, [position]);
}

/** Report that everything of this rank below a position is done. A position never falls. */
export async function report(server: Server, who: Membership, manifest: Manifest, position: number): Promise<void> {
  await runAsRank(server, who, begin(who.stream), "report_position", ...positionReport(who, manifest, position));
}

/**
 * Set this rank's position of an epoch, also to a lower one. The group then reads the epoch again.
 *
 * @throws ReplayTruncated if the epoch was released, or if entries below the group's minimum may be removed already.
 */
export async function rewind(server: Server, who: Membership, manifest: Manifest, position: number): Promise<void> {
  const { epoch } = manifest;
  const { rank, world } = who.order as Order;
  const before = await knownPositions(server, who.stream, epoch, who.group);
  // look everywhere first: a rank is taken back in all partitions or in none
  for (const lookOnly of [1, 0]) {
    let acknowledged = -1; // the first partition says what the group had acknowledged when the rank was taken back there
    for (const partition of who.stream.partitions) {
      const call = argumentsOf(partition, who, manifest, [epoch, position, lookOnly, acknowledged]);
      const [answer, found] = (await runAsRank(server, who, partition, "rewind_position", ...call)) as unknown[];
      acknowledged = Number(found);
      if (textOf(answer) === "ok") continue;
      if (lookOnly === 0) await report(server, who, manifest, positionOf(before, rank));
      throw new ReplayTruncated(
        `epoch ${epoch} of '${who.stream.name}' cannot be read again from position ${position}: group '${who.group}' had ` +
          `acknowledged all below ${lowestPosition(before, world)}, and retention has removed some of it; acknowledge at ` +
          "checkpoints, or give the stream a larger budget",
      );
    }
  }
}

/**
 * Run a script that a rank sends to a partition. Where the roster has lost the rank, it joins again.
 *
 * @throws MemberReplaced or GroupNotFound.
 */
export async function runAsRank(
  server: Server,
  who: Membership,
  partition: PartitionKeys,
  script: string,
  keys: readonly string[],
  args: readonly Argument[],
): Promise<unknown> {
  for (;;) {
    try {
      return await server.run(script, keys, args);
    } catch (error) {
      const hasLostPlace = error instanceof ReplyError && /PENSTOCK (replaced|gone|rank)/.test(error.message);
      if (!hasLostPlace) throw error;
      if (!(await rejoin(server, who, partition))) {
        throw await who.runs.explained(explainRefusal(who, error), partition);
      }
    }
  }
}

function explainRefusal({ group, member, stream }: Membership, { message }: ReplyError): PenstockError {
  if (message.includes("PENSTOCK replaced")) {
    return new MemberReplaced(
      `another process joined group '${group}' as '${member}': this one stops; each rank is one process`,
    );
  }
  if (message.includes("PENSTOCK rank")) {
    return new MemberReplaced(
      `group '${group}' is read by another number of ranks now: this one, '${member}', stops; start all ranks with one ` +
        "worldSize",
    );
  }
  return new GroupNotFound(
    `group '${group}' is no longer on the roster of '${stream.name}': it was dropped, or the server lost its data; ` +
      "start again",
  );
}

function argumentsOf(
  partition: PartitionKeys,
  { group, order, incarnation }: Membership,
  manifest: Manifest,
  rest: readonly Argument[],
): [string[], Argument[]] {
  const keys = [partition.roster, partition.state(manifest.epoch), partition.positions(manifest.epoch, group)];
  return [keys, [liveState(manifest), group, (order as Order).rank, incarnation, ...rest]];
}

function begin({ partitions }: Stream): PartitionKeys {
  return partitions[0] as PartitionKeys;
}
