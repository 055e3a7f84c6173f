// Sentences that explain a wait for quota or memory: what is held, which groups hold it, and what an operator can do.
// Python's writer has the same.

import { readableBytes } from "../printable.js";
import { absentGroups, type Holders } from "./holders.js";
import type { ServerMemory } from "./memory.js";
import { markBytes, ORDINARY_SHARE, type QuotaState } from "./quota.js";

/** An undeclared group that vanished stops holding data after this long. */
const SILENT_MS = 600_000;
const SHOWN = 4;
const QUARTER = "its last quarter is kept for the oldest unfinished shard";

/** What is known of those who keep the bytes. */
export interface Keepers {
  /** Groups that have not acknowledged most of what is held. */
  readonly blockers: readonly string[];
  readonly hasGroups: boolean;
  /** The bytes that waiting groups were given and have not acknowledged. */
  readonly unacknowledged: ReadonlyMap<string, number>;
  /** Missing members that waiting groups wait for, in words. */
  readonly missing: readonly string[];
  /** Whether an epoch is pinned or replayed. */
  readonly isKept: boolean;
}

function budgetOf(stream: string, { partition }: QuotaState): string {
  return `${partition === null ? "" : `partition ${partition}'s share of `}the budget of '${stream}'`;
}

/** Return the sentence that says why the quota does not admit a block, and what helps. */
export function explainQuota(stream: string, state: QuotaState, keepers: Keepers): string {
  const { blockers, hasGroups, unacknowledged, missing, isKept } = keepers;
  const held = readableBytes(state.heldBytes);
  const whole = readableBytes(state.budgetBytes);
  // less than the whole looks as if there were space
  const whyKept = held === whole ? "" : whyKeptFree(state);
  const share = held === whole ? "" : `, and the next block takes ${readableBytes(state.blockBytes)}${whyKept}`;
  const full = `${budgetOf(stream, state)} is full (${held} of ${whole}${share})`;
  if (!hasGroups) {
    return (
      `${full} and no group reads it: start a trainer, or \`penstock groups declare ${stream} NAME\`; an old epoch ` +
      `that no group will read is given up with \`penstock epochs abandon ${stream} EPOCH --force\``
    );
  }
  if (missing.length > 0) {
    const more = missing.length > SHOWN ? ` and ${missing.length - SHOWN} more` : "";
    return (
      `${full}, and trainers wait as well, for members last seen a while ago: ${missing.slice(0, SHOWN).join(", ")}` +
      `${more}; start them again under their names; what a member of a shared group holds comes to others when its ` +
      "lease has lapsed"
    );
  }
  if (unacknowledged.size > 0) {
    const each = [...unacknowledged].sort().map(([name, bytes]) => `group ${name} ${readableBytes(bytes)}`);
    return (
      `${full}, and trainers wait for samples while they have some that they were given and have not acknowledged ` +
      `(${each.join(", ")}): they have to acknowledge, or to save a checkpoint`
    );
  }
  if (blockers.length > 0) return `${full} because of group ${blockers.join(", ")}: it has yet to read`;
  if (!state.isNext) return whyKept !== "" ? full : `${full}; ${QUARTER}`;
  if (!isKept) return `${full} of what trainers were given and have not acknowledged`;
  return `${full} of epochs that a replay or a pin holds`;
}

/** Return why a block that the budget could hold has to wait, or "" for one that it could not. */
function whyKeptFree(state: QuotaState): string {
  const withBlock = state.heldBytes + state.blockBytes;
  if (withBlock > state.budgetBytes) return "";
  if (!state.isNext && withBlock > Math.floor(state.budgetBytes * ORDINARY_SHARE)) return `; ${QUARTER}`;
  return `; writers that waited fill only ${readableBytes(markBytes(state))}`;
}

/** Return what an operator can do about a wait, or "" if only time helps. */
export function explainHolds(stream: string, holders: Holders, blockers: readonly string[], nowMs: number): string {
  const parts = [...absentGroups(holders, blockers, nowMs)].map(([name, unseenMs]) => {
    const own = holders.groups.get(name)?.isDeclared
      ? "it is declared, so data is kept for it"
      : `it lets go after ${span(SILENT_MS)}`;
    return (
      `no trainer of group '${name}' was seen for ${span(unseenMs)} (${own}): start one, or give the group up with ` +
      `\`penstock groups drop ${stream} ${name}\``
    );
  });
  const pinned = holders.epochs.filter((epoch) => holders.pinned.has(epoch));
  const held = pinned.reduce((sum, epoch) => sum + (holders.epochBytes.get(epoch) ?? 0), 0);
  if (held > 0) {
    const are = pinned.length > 1 ? "s" : "";
    parts.push(
      `epoch${are} ${pinned.join(", ")} ${are ? "are" : "is"} pinned, with ${readableBytes(held)}: ` +
        `\`penstock epochs unpin ${stream} ${pinned[0]}\``,
    );
  }
  return parts.join("; ");
}

/** Return the sentence for a wait on the server's memory, which others fill. */
export function explainMemory(stream: string, state: QuotaState, memory: ServerMemory): string {
  const { usedBytes, limitBytes, leftBytes } = memory;
  return (
    `the server uses ${readableBytes(usedBytes)} of its maxmemory ${readableBytes(limitBytes)}, of which writers leave ` +
    `${readableBytes(limitBytes - usedBytes - (leftBytes ?? 0))} free; of ${budgetOf(stream, state)} only ` +
    `${readableBytes(state.heldBytes)} of ${readableBytes(state.budgetBytes)} are used: remove other keys, or raise ` +
    "maxmemory"
  );
}

function span(ms: number): string {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(0)} h`;
}
