// The roster of each partition: groups, members, epochs, bytes and waiting writers, and how members join, give
// heartbeats, join again after a loss, and leave.

import { setTimeout as sleep } from "node:timers/promises";
import { EpochsReleased, GroupBusy, GroupKindMismatch, GroupNotFound, MemberReplaced, ReplyError } from "../errors.js";
import { type Argument, hashOf, type Server, textOf } from "../server/client.js";
import { near } from "../spelling.js";
import { now } from "../waiting.js";
import { integer, readable } from "./damage.js";
import { type PartitionKeys, requireNames } from "./keys.js";
import { type EpochState, statesOf } from "./manifest.js";
import { parseRanges, type Range } from "./ranges.js";
import type { ServerRuns } from "./serverRuns.js";
import { requireThere, type Stream } from "./stream.js";

/** After a silence this long, an ordered group may change its ranks. */
const QUIET_MS = 5000;
/** After a silence this long a member is shown as dead. It loses nothing by that. */
export const UNSEEN_MS = 10_000;
/** The time between two looks at the other rosters. One who drops a group is through with all of them by then. */
const REJOIN_SETTLE_MS = 1000;
/** The time between two looks at a roster that lost this member. */
const REJOIN_LOOK_MS = 250;
/** A rank of another number of ranks that was seen more recently is at work. A member renews every two seconds. */
const REJOIN_ALIVE_MS = 2500;
/** A note of a waiting writer that is older counts for nothing. */
const STALE_MS = 10_000;

/** How members of a group share its samples. It never changes. */
export type GroupKind = "shared" | "ordered";

/** A group as a partition knows it. */
export interface GroupRecord {
  /** The first epoch that it reads. */
  readonly first: number;
  readonly kind: GroupKind;
  /** The highest epoch that it read and that is released by now, or -1. */
  readonly read: number;
  /** The number of ranks, or 0 in a shared group. */
  readonly world: number;
  /** The whole record as the roster has it. */
  readonly text: string;
}

/** A process in a group as a partition knows it. */
export interface MemberRecord {
  readonly group: string;
  readonly member: string;
  /** Names the process. See `presence`. */
  readonly incarnation: string;
  /** The server's time of its last heartbeat. */
  readonly seenMs: number;
}

/** A writer that waits until there is space for its block. */
export interface WaitingWriter {
  /** `budget`, `memory` or `folder`. */
  readonly why: string;
  /** Whether it has the lowest unfinished shard. */
  readonly isNext: boolean;
  readonly seenMs: number;
}

/** A partition's roster at one moment. */
export interface Roster {
  readonly groups: ReadonlyMap<string, GroupRecord>;
  readonly members: readonly MemberRecord[];
  /** The epochs that have keys in the partition, ascending. */
  readonly epochs: readonly number[];
  /** Epochs of which entries were removed. */
  readonly trimmed: ReadonlySet<number>;
  /** Epochs whose release has begun. */
  readonly retiring: ReadonlySet<number>;
  /** Ranges of the epochs whose release took them off this roster. An epoch that the server lost is in none. */
  readonly retired: readonly Range[];
  /** `group:epoch` of each group that is done with an epoch. */
  readonly closed: ReadonlySet<string>;
  /** The payload bytes that the partition holds. */
  readonly bytes: number;
  readonly waiting: readonly WaitingWriter[];
}

/** Read the roster of a partition. Raises DamagedKey. */
export async function loadRoster(server: Server, partition: PartitionKeys): Promise<Roster> {
  return rosterOf(partition, await server.call("HGETALL", partition.roster));
}

function rosterOf({ roster }: PartitionKeys, reply: unknown): Roster {
  return readable(roster, () => {
    const fields = hashOf(reply);
    const kinds = new Map<string, [rest: string, value: string][]>();
    for (const [name, value] of fields) {
      const at = name.indexOf(":");
      if (at < 0) continue;
      const kind = kinds.get(name.slice(0, at));
      if (kind === undefined) kinds.set(name.slice(0, at), [[name.slice(at + 1), value]]);
      else kind.push([name.slice(at + 1), value]);
    }
    const of = (kind: string) => kinds.get(kind) ?? [];
    const epochsOf = (kind: string) => of(kind).map(([epoch]) => integer(epoch));
    const members = of("m").map(([name, text]) => memberOf(name, text));
    requireNames([...of("g").map(([name]) => name), ...members.flatMap(({ group, member }) => [group, member])]);
    return {
      groups: new Map(of("g").map(([name, text]) => [name, groupOf(text)])),
      members,
      epochs: epochsOf("e").sort((a, b) => a - b),
      trimmed: new Set(epochsOf("t")),
      retiring: new Set(epochsOf("x")),
      retired: parseRanges(fields.get("retired") ?? ""),
      closed: new Set(of("d").map(([name]) => name)),
      bytes: integer(fields.get("bytes") ?? "0"),
      waiting: of("w").map(([, text]) => {
        const { why, next, seen } = JSON.parse(text);
        return { why: String(why), isNext: Boolean(next), seenMs: numberOf(seen) };
      }),
    };
  });
}

function groupOf(text: string): GroupRecord {
  const { first, kind, read = -1, world = 0 } = JSON.parse(text);
  if (kind !== "shared" && kind !== "ordered") throw new RangeError(`a group is ${String(kind).slice(0, 40)}`);
  return { first: numberOf(first), kind, read: numberOf(read), world: numberOf(world), text };
}

function memberOf(name: string, text: string): MemberRecord {
  const at = name.indexOf(":");
  const { inc = "", seen } = JSON.parse(text);
  return {
    group: name.slice(0, at),
    member: name.slice(at + 1),
    incarnation: String(inc),
    seenMs: numberOf(seen),
  };
}

function numberOf(value: unknown): number {
  if (typeof value === "number" && Number.isSafeInteger(value)) return value;
  throw new RangeError(`${String(value).slice(0, 40)} is no number`);
}

/** A partition at one moment, with what it takes to judge its members. */
export interface Snapshot {
  readonly roster: Roster;
  /** The roster of the first partition, which hears of groups first. */
  readonly first: Roster;
  /** The server's time. */
  readonly nowMs: number;
  readonly states: ReadonlyMap<number, EpochState>;
}

/** Read the facts in one round trip. Raises DamagedKey. */
export async function snapshotOf(server: Server, stream: Stream, partition: PartitionKeys): Promise<Snapshot> {
  const begin = stream.partitions[0] as PartitionKeys;
  const [nowMs, states, own, first] = await Promise.all([
    serverMs(server, partition),
    server.call("HGETALL", stream.keys.epochs),
    server.call("HGETALL", partition.roster),
    partition === begin ? null : server.call("HGETALL", begin.roster),
  ]);
  const roster = rosterOf(partition, own);
  return {
    roster,
    first: first === null ? roster : rosterOf(begin, first),
    nowMs,
    states: statesOf(stream, states),
  };
}

/** Return the clock of a partition's server in ms. */
export async function serverMs(server: Server, { roster }: PartitionKeys): Promise<number> {
  return await clockOf(server, roster);
}

/** Return the clock of the server that holds a key in ms. */
export async function clockOf(server: Server, key: string): Promise<number> {
  const [seconds, micros] = ((await server.callAt(key, "TIME")) as unknown[]).map(textOf);
  return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000);
}

/** Return how many members of a group were seen about as lately as the last one, at least 1. */
export function countLive({ members }: Roster, group: string): number {
  const seen = members.filter((one) => one.group === group).map(({ seenMs }) => seenMs);
  const last = Math.max(...seen);
  return Math.max(1, seen.filter((at) => at > last - UNSEEN_MS).length);
}

/** Return the writers whose notes are not stale. */
export function waitingWriters({ waiting }: Roster, nowMs: number): WaitingWriter[] {
  return waiting.filter(({ seenMs }) => nowMs - seenMs <= STALE_MS);
}

/** What makes a member one rank of an ordered group. */
export interface Order {
  readonly rank: number;
  /** The number of ranks. */
  readonly world: number;
  /** The samples of a rank's batch. */
  readonly batch: number;
}

/** A member of a group, with all that a script on rosters needs to know. */
export interface Membership {
  readonly stream: Stream;
  readonly group: string;
  readonly member: string;
  readonly incarnation: string;
  /** Null in a shared group. */
  readonly order: Order | null;
  /** The runs of the servers at the join. */
  readonly runs: ServerRuns;
}

/** Epoch to the ids of the entries that a member holds in one partition. */
export type Held = ReadonlyMap<number, readonly string[]>;

/** Return the member name of a rank. */
export function rankMember(rank: number): string {
  return `rank-${rank}`;
}

/** How a group is joined. */
export interface JoinOptions {
  /** The first epoch that a new group reads. */
  readonly first: number;
  /** Go on although epochs were lost. */
  readonly force: boolean;
  /** Ranks of another world size that were unseen for so long are gone. */
  readonly quietMs?: number;
}

/**
 * Write group and member on every partition's roster, and return the first epoch that the group reads. After an error no
 * roster has changed.
 *
 * @throws EpochsReleased, GroupKindMismatch, GroupBusy or StreamDeleted.
 */
export async function joinGroup(server: Server, who: Membership, options: JoinOptions): Promise<number> {
  const { partitions } = who.stream;
  if (partitions.length > 1) {
    // a server that came back older may know another group of this name
    const args = [...joinArguments(who, options, false), 1];
    const looks = partitions.map(({ roster }) => server.run("join_group", [roster], args) as Promise<unknown[]>);
    for (const [answer, ...facts] of await Promise.all(looks)) {
      if (textOf(answer) !== "joined") throw refusal(who, textOf(answer), facts);
    }
  }
  const answers: number[] = [];
  for (const partition of partitions) answers.push(await join(server, who, partition, options, false));
  const highest = Math.max(...answers);
  if (Math.min(...answers) < highest) {
    for (const partition of partitions) await join(server, who, partition, { ...options, first: highest }, true);
  }
  await requireThere(server, who.stream);
  return highest;
}

async function join(
  server: Server,
  who: Membership,
  partition: PartitionKeys,
  options: JoinOptions,
  raises: boolean,
): Promise<number> {
  const { group, order } = who;
  for (;;) {
    const { epochs } = await loadRoster(server, partition);
    const keyOf = (epoch: number) => (order === null ? partition.entries(epoch) : partition.positions(epoch, group));
    const args = [...joinArguments(who, options, raises), 0, ...epochs];
    const reply = await server.run("join_group", [partition.roster, ...epochs.map(keyOf)], args);
    const [answer, ...facts] = reply as unknown[];
    if (textOf(answer) === "joined") return Number(facts[0]);
    if (textOf(answer) !== "epochs") throw refusal(who, textOf(answer), facts);
  }
}

function joinArguments(
  { group, member, incarnation, order }: Membership,
  { first, force, quietMs = QUIET_MS }: JoinOptions,
  raises: boolean,
): Argument[] {
  const kind: GroupKind = order === null ? "shared" : "ordered";
  const flags = [0, first, Number(raises), Number(force)];
  return [group, member, incarnation, ...flags, kind, order?.world ?? 0, order?.batch ?? 0, quietMs];
}

function refusal({ group, stream, order }: Membership, answer: string | null, facts: readonly unknown[]): Error {
  const said = facts.map((fact) => (typeof fact === "number" ? String(fact) : textOf(fact)));
  const drop = `give this one up with \`penstock groups drop ${stream.name} ${group}\``;
  const other = `use another group name, or ${drop}`;
  const declare = `penstock groups declare ${stream.name} ${group} --ordered`;
  const declared = order === null ? "" : `; \`${declare}\` then declares one for ranks`;
  switch (answer) {
    case "lost":
      return new EpochsReleased(
        `group '${group}' had stopped holding data and epochs ${said[0]}-${said[1]} of '${stream.name}' were released ` +
          "before it read them: give start: 'remaining' to go on without them, start: 'earliest' or an epoch to read " +
          "again, or use a new group",
      );
    case "kind":
      return new GroupKindMismatch(
        `group '${group}' of '${stream.name}' is ${said[0]}, and a group stays what it was made as; this trainer would ` +
          `read it ${order === null ? "shared" : "ordered"}: ${other}${declared}`,
      );
    case "batch": {
      const steps = (order?.batch ?? 0) / Number(said[0]);
      const same = Number.isInteger(steps)
        ? ` (gradients accumulated over ${steps} batches keep the global batch)`
        : "";
      return new GroupKindMismatch(
        `group '${group}' of '${stream.name}' is read in batches of ${said[0]}, this trainer's batchSize is ` +
          `${order?.batch}: positions count whole batches, so give batchSize: ${said[0]}${same}; or ${other}. Another ` +
          "group begins at the start of an epoch",
      );
    }
    default:
      return new GroupBusy(
        `group '${group}' of '${stream.name}' is read by ${said[0]} ranks, of which ${said.slice(1).join(", ")} are ` +
          `alive; worldSize ${order?.world} can only take over from there when they have stopped`,
      );
  }
}

/** What a heartbeat says of a loop that waits for a batch. */
export interface IdleLoop {
  /** How long it has waited. */
  readonly idleMs: number;
  /** The payload bytes that it was given and has not acknowledged. */
  readonly handedBytes: number;
}

/**
 * Send a heartbeat: renew group, member and the given entries.
 *
 * @returns Epoch to the ids that the member no longer holds.
 * @throws MemberReplaced, GroupNotFound or StreamDeleted.
 */
export async function beat(
  server: Server,
  who: Membership,
  partition: PartitionKeys,
  held: Held,
  idle: IdleLoop | null,
): Promise<Map<number, string[]>> {
  const said = [idle === null ? -1 : Math.round(idle.idleMs), idle?.handedBytes ?? 0];
  let lost: unknown[][];
  try {
    lost = (await server.run("heartbeat", ...withIds(who, partition, held, said))) as unknown[][];
  } catch (error) {
    if (!(error instanceof ReplyError)) throw error;
    const isReplaced = error.message.includes("PENSTOCK replaced");
    if (!isReplaced && !error.message.includes("PENSTOCK gone")) throw error;
    if (!isReplaced) await requireThere(server, who.stream);
    if (await rejoin(server, who, partition)) return await beat(server, who, partition, held, idle);
    if (isReplaced) {
      const replaced = new MemberReplaced(
        `another process joined group '${who.group}' as member '${who.member}': this one stops; give each process its ` +
          "own member name",
      );
      throw await who.runs.explained(replaced, partition);
    }
    const gone = new GroupNotFound(
      `group '${who.group}', or its member '${who.member}', is no longer on the roster of '${who.stream.name}': it was ` +
        "dropped, not heard of for 10 minutes, or the server lost its data; start again",
    );
    throw await who.runs.explained(gone, partition);
  }
  return new Map([...held.keys()].map((epoch, at) => [epoch, (lost[at] ?? []).map((id) => textOf(id) as string)]));
}

/**
 * Put a member back on a roster that lost it, or that names a process which had its name before. A server that came back
 * older does that. At two looks another partition's roster must know this process as the member: a group that was dropped
 * is on no roster, and a process that took over the name is on all. A process that the roster names must give no
 * heartbeat between the looks. Of two that live, the one that a lower partition names goes on.
 *
 * If every server is known to be another run than at the join, all may have lost the process. Then it joins again if the
 * roster still has its group. Of two processes that live, the one that the roster names goes on.
 *
 * A roster may be of before the number of ranks changed. It takes the new number if its server is known to be another run
 * than at the join, and no rank that it names lives.
 *
 * @returns False if this process must end.
 */
export async function rejoin(server: Server, who: Membership, partition: PartitionKeys): Promise<boolean> {
  const others = who.stream.partitions.filter((one) => one !== partition);
  for (let before: string | null = null, since = 0; ; await sleep(REJOIN_LOOK_MS)) {
    const rosters = await Promise.all(others.map((one) => loadRoster(server, one)));
    const roster = await loadRoster(server, partition);
    const at = rosters.findIndex((one) => isKnown(one, who)); // the lowest partition that knows it
    const isUnknown = at < 0;
    if (isUnknown && !(await who.runs.areAllReplaced(server))) return false;
    const record = groupOn(rosters[at] ?? roster, who);
    if (record === undefined) return false;
    const isLowerKnown = !isUnknown && (others[at] as PartitionKeys).number < partition.number;
    const here = roster.groups.get(who.group);
    const isOlder = here !== undefined && here.world !== 0 && here.world !== record.world;
    if (isOlder && !(await who.runs.isReplaced(partition, server))) return false;
    const named = textOf(await server.call("HGET", partition.roster, `m:${who.group}:${who.member}`)) ?? "";
    const isBack = named !== "" && JSON.parse(named).inc === who.incarnation; // another call was first
    const lives = before !== null && named !== before && named !== ""; // else another rank has removed it
    const isFirstLook = before === null || (named !== before && named === "");
    if (!isBack && (isFirstLook || (lives && isLowerKnown))) {
      [before, since] = [named, now()];
      continue;
    }
    const quietMs = named === "" && !isOlder ? REJOIN_SETTLE_MS : QUIET_MS;
    if (!(isBack || lives) && now() - since < quietMs) continue;
    if (!isOlder || (!lives && (await changeRanks(server, who, partition, record)))) {
      const closed = closedBy(rosters, who.group);
      if (!(await restoreGroup(server, who, partition, record, closed, before ?? ""))) return false;
      // In an older roster the group may have stopped holding data.
      await join(server, who, partition, { first: record.first, force: !isUnknown, quietMs: REJOIN_ALIVE_MS }, false);
      return true;
    }
    if (!isLowerKnown) return false; // the ranks that live there go on
    before = null;
  }
}

/** Return whether a roster has the group with this number of ranks, and this process as its member. */
function isKnown(roster: Roster, who: Membership): boolean {
  const { group, member, incarnation } = who;
  const isThis = (one: MemberRecord) => one.group === group && one.member === member && one.incarnation === incarnation;
  return roster.members.some(isThis) && groupOn(roster, who) !== undefined;
}

/** Return the group of a roster if it is of this kind and number of ranks. */
function groupOn({ groups }: Roster, { group, order }: Membership): GroupRecord | undefined {
  const record = groups.get(group);
  const isSame =
    order === null ? record?.kind === "shared" : record?.kind === "ordered" && record.world === order.world;
  return isSame ? record : undefined;
}

/** Join with this number of ranks, as at the first time. Returns false if a rank of the others lives. */
async function changeRanks(
  server: Server,
  who: Membership,
  partition: PartitionKeys,
  { first }: GroupRecord,
): Promise<boolean> {
  try {
    await join(server, who, partition, { first, force: true, quietMs: REJOIN_ALIVE_MS }, false);
    return true;
  } catch (error) {
    if (error instanceof GroupBusy) return false;
    throw error;
  }
}

/** Return the epochs that a roster knows as acknowledged by the group, as text. */
function closedBy(rosters: readonly Roster[], group: string): string[] {
  const names = new Set(rosters.flatMap(({ closed }) => [...closed]));
  return [...names].filter((name) => name.startsWith(`${group}:`)).map((name) => name.slice(group.length + 1));
}

async function restoreGroup(
  server: Server,
  { group, member, incarnation }: Membership,
  partition: PartitionKeys,
  record: GroupRecord,
  closed: readonly string[],
  before: string,
): Promise<boolean> {
  for (;;) {
    const { epochs } = await loadRoster(server, partition);
    const keys = [partition.roster, ...epochs.map((epoch) => partition.entries(epoch))];
    const args = [group, record.text, member, incarnation, before, closed.length, ...closed, ...epochs];
    const answer = Number(await server.run("restore_group", keys, args));
    if (answer !== 0) return answer > 0;
  }
}

/** Return the given entries to the group and leave. Returns false if another process has the name, or none. */
export async function leaveGroup(
  server: Server,
  who: Membership,
  partition: PartitionKeys,
  held: Held,
): Promise<boolean> {
  const wasThere = Boolean(await server.run("leave_group", ...withIds(who, partition, held)));
  const { epochs } = await loadRoster(server, partition);
  const entries = epochs.map((epoch) => partition.entries(epoch));
  if (entries.length > 0) await server.run("forget_consumers", entries, [who.group, who.member]);
  return wasThere;
}

function withIds(
  { group, member, incarnation }: Membership,
  partition: PartitionKeys,
  held: Held,
  said: readonly Argument[] = [],
): [string[], Argument[]] {
  const args: Argument[] = [group, member, incarnation, ...said];
  for (const ids of held.values()) args.push(ids.length, ...ids);
  return [[partition.roster, ...[...held.keys()].map((epoch) => partition.entries(epoch))], args];
}

/** Note in every partition that the group is done with the epoch. */
export async function closeForGroup(server: Server, stream: Stream, group: string, epoch: number): Promise<void> {
  for (const { roster } of stream.partitions) await server.run("close_epoch_for_group", [roster], [group, epoch]);
}

/** Return the error for a missing group, which names the existing ones. */
export function unknownGroup(stream: string, group: string, groups: Iterable<string>): GroupNotFound {
  const names = [...groups].sort();
  const meant = near(group, names);
  const hint = meant ? `; did you mean '${meant}'?` : "";
  return new GroupNotFound(
    `stream '${stream}' has no group '${group}'; groups there: ${names.join(", ") || "none"}${hint}`,
  );
}
