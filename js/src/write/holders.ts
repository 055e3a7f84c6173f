// The holders of a partition's bytes, by its roster: groups, members, pins and replays, and which groups are
// unfinished, idle or absent.

import { hashOf, type Server, textOf } from "../server/client.js";
import { integer, readable } from "../stream/damage.js";
import { type PartitionKeys, requireNames } from "../stream/keys.js";
import { ALIVE_MS } from "../stream/presence.js";
import { rankMember, UNSEEN_MS } from "../stream/roster.js";

/** A group that reads the stream. */
export interface Holder {
  /** The first epoch that it reads. */
  readonly first: number;
  readonly isDeclared: boolean;
  /** Whether the stream keeps for it what it has not read. */
  readonly holds: boolean;
  readonly seenMs: number;
  readonly isOrdered: boolean;
  /** The ranks of an ordered group. */
  readonly world: number;
  /** The samples of a rank's batch. */
  readonly batch: number;
}

/** A member of a group. */
export interface HolderMember {
  readonly group: string;
  readonly member: string;
  readonly seenMs: number;
  /** The payload bytes that it was given and has not acknowledged, or null unless its loop waits for a batch. */
  readonly handedBytes: number | null;
}

/** A partition's roster, as far as a writer asks for it. */
export interface Holders {
  readonly groups: ReadonlyMap<string, Holder>;
  readonly members: readonly HolderMember[];
  readonly epochs: readonly number[];
  readonly epochBytes: ReadonlyMap<number, number>;
  /** `group:epoch` of each group that is done with an epoch. */
  readonly closed: ReadonlySet<string>;
  readonly pinned: ReadonlySet<number>;
  /** The epoch that each replay holds, and until when by the server's clock. */
  readonly replays: readonly { readonly epoch: number; readonly till: number }[];
  /** Changes when a member joins or a lease holds an epoch, so that a removal that was planned before is refused. */
  readonly generation: string;
}

/** Read who keeps what in a partition. Raises DamagedKey. */
export async function loadHolders(server: Server, { roster }: PartitionKeys): Promise<Holders> {
  const fields = hashOf(await server.call("HGETALL", roster));
  return readable(roster, () => {
    const of = (kind: string) =>
      [...fields].filter(([name]) => name.startsWith(kind)).map(([name, text]) => [name.slice(2), text] as const);
    const numbers = (kind: string) => of(kind).map(([epoch]) => integer(epoch));
    const members = of("m:").map(([name, text]) => memberOf(name, JSON.parse(text)));
    requireNames([...of("g:").map(([name]) => name), ...members.flatMap(({ group, member }) => [group, member])]);
    return {
      groups: new Map(of("g:").map(([name, text]) => [name, holderOf(JSON.parse(text))])),
      members,
      epochs: numbers("e:").sort((a, b) => a - b),
      epochBytes: new Map(of("b:").map(([epoch, text]) => [integer(epoch), integer(text)])),
      closed: new Set(of("d:").map(([name]) => name)),
      pinned: new Set(numbers("p:")),
      replays: of("r:").map(([, text]) => replayOf(JSON.parse(text))),
      generation: fields.get("gen") ?? "0",
    };
  });
}

function holderOf(value: Record<string, unknown>): Holder {
  return {
    first: Number(value.first),
    isDeclared: Boolean(value.declared),
    holds: Boolean(value.holds),
    seenMs: Number(value.seen),
    isOrdered: value.kind === "ordered",
    world: Number(value.world ?? 0),
    batch: Number(value.batch ?? 0),
  };
}

function replayOf(value: Record<string, unknown>): Holders["replays"][number] {
  return { epoch: Number(value.epoch), till: Number(value.till) };
}

/** Return whether a pin or a replay's lease keeps the epoch, acknowledged or not. */
export function isHeld({ pinned, replays }: Holders, epoch: number, nowMs: number): boolean {
  return pinned.has(epoch) || replays.some((one) => one.epoch === epoch && one.till > nowMs);
}

function memberOf(name: string, value: Record<string, unknown>): HolderMember {
  const at = name.indexOf(":");
  return {
    group: name.slice(0, at),
    member: name.slice(at + 1),
    seenMs: Number(value.seen),
    handedBytes: value.idle === undefined ? null : Number(value.handed),
  };
}

/** Return the names of the groups that hold data, read the epoch, and have not acknowledged all of it. */
export function unfinishedGroups({ groups, closed }: Holders, epoch: number): Map<string, Holder> {
  const isUnfinished = ([name, { holds, first }]: [string, Holder]) =>
    holds && first <= epoch && !closed.has(`${name}:${epoch}`);
  return new Map([...groups].filter(isUnfinished));
}

/** Return groups whose live members all wait for a batch, with the bytes that they have not acknowledged. */
export function idleGroups({ members }: Holders, nowMs: number): Map<string, number> {
  const live = members.filter(({ seenMs }) => nowMs - seenMs < ALIVE_MS);
  const busy = new Set(live.filter(({ handedBytes }) => handedBytes === null).map(({ group }) => group));
  const found = new Map<string, number>();
  for (const { group, handedBytes } of live) {
    if (!busy.has(group)) found.set(group, (found.get(group) ?? 0) + (handedBytes ?? 0));
  }
  return found;
}

/** Return those of the groups that have no live member, with the time since they were last seen. */
export function absentGroups(
  { groups, members }: Holders,
  names: readonly string[],
  nowMs: number,
): Map<string, number> {
  const live = new Set(members.filter(({ seenMs }) => nowMs - seenMs < ALIVE_MS).map(({ group }) => group));
  const found = new Map<string, number>();
  for (const name of names) {
    const group = groups.get(name);
    if (group !== undefined && !live.has(name)) found.set(name, nowMs - group.seenMs);
  }
  return found;
}

/** Return the members of these groups that are missing, in words: silent ones that hold entries, and ranks. */
export async function missingMembers(
  server: Server,
  partition: PartitionKeys,
  holders: Holders,
  groups: Iterable<string>,
  nowMs: number,
): Promise<string[]> {
  const found: string[] = [];
  for (const name of [...groups].sort()) {
    const { isOrdered, holds, world } = holders.groups.get(name) as Holder;
    const known = new Map(holders.members.filter(({ group }) => group === name).map((one) => [one.member, one]));
    const ranks = Array.from({ length: isOrdered && holds ? world : 0 }, (_, rank) => rankMember(rank));
    const holding = isOrdered ? new Set(ranks) : await holdingMembers(server, partition, holders, name);
    for (const member of isOrdered ? ranks : [...known.keys()].sort()) {
      const unseen = known.has(member) ? nowMs - (known.get(member) as HolderMember).seenMs : null;
      if (!holding.has(member) || (unseen !== null && unseen <= UNSEEN_MS)) continue;
      found.push(
        `${member} of group ${name} (${unseen === null ? "not there" : `${(unseen / 1000).toFixed(0)} s ago`})`,
      );
    }
  }
  return found;
}

async function holdingMembers(
  server: Server,
  partition: PartitionKeys,
  { epochs, closed }: Holders,
  group: string,
): Promise<Set<string>> {
  const found = new Set<string>();
  for (const epoch of epochs) {
    if (closed.has(`${group}:${epoch}`)) continue;
    const [reply] = await server.sequence([["XPENDING", partition.entries(epoch), group]]);
    const consumers = (reply instanceof Error ? [] : ((reply as unknown[])[3] ?? [])) as unknown[][]; // released, else
    for (const [name] of consumers) found.add(textOf(name) as string);
  }
  return found;
}
