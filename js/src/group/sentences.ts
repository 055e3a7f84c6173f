// Sentences for the user of a loader: why no batch or epoch comes, and the notices on new groups and absent ranks.
// Python's consumer has the same.

import { PenstockError } from "../errors.js";
import { readableBytes } from "../printable.js";
import type { Server } from "../server/client.js";
import { near, nearest } from "../spelling.js";
import { loadRoster, type Membership, type Order, type Roster, serverMs, waitingWriters } from "../stream/roster.js";
import type { Stream } from "../stream/stream.js";
import { LATE, within } from "./backgroundQuery.js";

/** The longest wait of an explanation for a server, which the training job must not feel. */
const EXPLAINED_MS = 1000;

/**
 * The wait after which the command is named that ends an epoch without its producer. Workers import for some seconds
 * before their first sample.
 */
const CLOSE_AFTER_MS = 20_000;
/** The most similar groups that the notice on a new group names. A sweep makes a group for each trial. */
const NAMED = 3;

/** Return an answer that an explanation needs, or something else if the server is away: it neither fails nor waits. */
export async function unlessAway<T>(asked: Promise<T>, otherwise: T): Promise<T> {
  try {
    const answer = await within(asked, EXPLAINED_MS);
    return answer === LATE ? otherwise : answer;
  } catch (error) {
    if (error instanceof PenstockError) return otherwise;
    throw error;
  }
}

/** Return why the awaited shard's writer waits for space, or "" if it does not wait, or the server is away. */
export async function whyNoRoom(server: Server, stream: Stream): Promise<string> {
  return await unlessAway(findWhyNoRoom(server, stream), "");
}

async function findWhyNoRoom(server: Server, stream: Stream): Promise<string> {
  for (const partition of stream.partitions) {
    const nowMs = await serverMs(server, partition);
    const roster = await loadRoster(server, partition);
    // a full folder holds up every writer
    const [awaited] = waitingWriters(roster, nowMs).filter(({ isNext, why }) => isNext || why === "folder");
    if (awaited === undefined) continue;
    if (awaited.why === "memory") return "its writer waits for space in the server's memory, which others fill";
    if (awaited.why === "folder") {
      const folder = stream.payload.slice(stream.payload.indexOf(":") + 1);
      return `its writer waits for space in the full folder of its payloads (${folder})`;
    }
    const budget = readableBytes(Math.floor(stream.budgetBytes / stream.partitions.length));
    const share = stream.partitions.length > 1 ? `partition ${partition.number}'s share of ` : "";
    const held = `${readableBytes(roster.bytes)} of ${share}the budget, ${budget}, is held`;
    return `its writer waits for space (${held}; \`penstock inspect ${stream.name}\` says by which groups)`;
  }
  return "";
}

/** Return what to look at, and in time what to do, if no sample of an epoch came for this time. */
export function whetherProducerRuns(stream: string, epoch: number, ms: number): string {
  const asked = `Is a producer running (\`penstock inspect ${stream}\`)?`;
  if (ms < CLOSE_AFTER_MS) return `${asked} Its workers may still be starting`;
  return `${asked} If none will: \`penstock epochs close ${stream} ${epoch}\``;
}

/** Facts on a group for which there is no epoch to read now. */
export interface NoEpoch {
  readonly stream: string;
  readonly group: string;
  /** The roster of the first partition. */
  readonly roster: Roster;
  /** The first epoch that the group reads. */
  readonly first: number;
  /** The number of epochs that were begun. */
  readonly begun: number;
  /** Epochs that this member was given to their end. */
  readonly given: readonly number[];
  /** An epoch that a producer is opening, or null. */
  readonly halfOpen: number | null;
  /** Whether the newest epoch that was given is one of a feed. */
  readonly isFeed: boolean;
}

/** Return why a group has no epoch to read now, and which command makes one. */
export function whyNoEpoch({ stream, group, roster, first, begun, given, halfOpen, isFeed }: NoEpoch): string {
  if (halfOpen !== null) {
    const died = `\`penstock epochs abandon ${stream} ${halfOpen}\` if that died`;
    return `epoch ${halfOpen} of '${stream}' is being opened by a producer; ${died}`;
  }
  const read = new Set(given);
  const record = roster.groups.get(group);
  for (let epoch = record?.first ?? 0; epoch <= (record?.read ?? -1); epoch += 1) read.add(epoch);
  for (const name of roster.closed) {
    const at = name.lastIndexOf(":");
    if (name.slice(0, at) === group) read.add(Number(name.slice(at + 1)));
  }
  if (read.size > 0) {
    const numbers = [...read].sort((a, b) => a - b);
    return (
      `group '${group}' has read ${numbers.length === 1 ? "epoch" : "epochs"} ${rangesOf(numbers)} of '${stream}'; ` +
      `there is no other: ${isFeed ? "a Writer" : "`penstock produce`"} makes one; ` +
      "start: 'earliest' or `replay` reads the retained again"
    );
  }
  const isBeforeWhole = roster.epochs.includes(first - 1) && !roster.trimmed.has(first - 1);
  if (first > begun || (first === begun && isBeforeWhole)) {
    return (
      `group '${group}' is to begin with epoch ${first} of '${stream}', of which ${begun} were begun (0 is the first): ` +
      `it is not there yet; \`penstock produce\` makes epoch ${begun} next`
    );
  }
  if (first === begun && first > 0) {
    return (
      `group '${group}' came after epoch ${first - 1} of '${stream}', which is not whole any more, and begins with ` +
      `epoch ${first}: it is not there yet; \`penstock produce\` makes epoch ${begun} next`
    );
  }
  const which = begun > 0 ? "has no other epoch" : "has no epoch yet";
  return `stream '${stream}' ${which} for group '${group}': \`penstock produce\` makes one`;
}

function rangesOf(numbers: readonly number[]): string {
  const ranges: [number, number][] = [];
  for (const number of numbers) {
    const last = ranges.at(-1);
    if (last !== undefined && number === last[1] + 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([lo, hi]) => (lo === hi ? String(lo) : `${lo}-${hi}`)).join(",");
}

/** Return the notice on a new group of a stream that has others, because its name may be misspelt. */
export function newGroupNotice(group: string, others: readonly string[], first: number): string {
  const meant = near(group, others);
  const more = others.length > NAMED ? ` and ${others.length - NAMED} more` : "";
  const question = meant ? `. Did you mean '${meant}'?` : "";
  const names = nearest(group, others, NAMED).join(", ");
  return `new group '${group}' (there are: ${names}${more}); it starts at epoch ${first}${question}`;
}

/** Return the notice on ranks that never came, at the end of an epoch that another rank read. */
export function absentNotice({ order, group }: Membership, epoch: number, absent: readonly number[]): string {
  const { world } = order as Order;
  const [first] = absent;
  const ranks = absent.length === 1 ? `rank ${first}` : `ranks ${absent.join(", ")}`;
  return (
    `epoch ${epoch} ended here, and ${ranks} of the ${world} ranks of group '${group}' did not come: ` +
    `${absent.length}/${world} of its samples wait for them. If no process has rank: ${first} and this worldSize, ` +
    "start one; for one process alone, give worldSize: 1 and a new group"
  );
}

/** Return the notice on an epoch that is smaller than one step of ranks that leave out the last one. */
export function noStepNotice(stream: string, epoch: number, samples: number, step: number): string {
  return (
    `epoch ${epoch} of '${stream}' gave no batch: its ${samples} samples do not fill one step of ${step}, and dropLast ` +
    "leaves the rest out"
  );
}
