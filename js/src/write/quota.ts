// Quotas: the values and the pure rules that decide whether a block may be written now, and how long to wait.
// `admission` asks them for one shard.

/** The share of a budget for all shards. The rest is for the lowest unfinished shard of the oldest unfinished epoch. */
export const ORDINARY_SHARE = 0.75;
/** A writer that waited goes on when this share of the budget below its mark is free. */
const LOW_SHARE = 0.1;
/** After this wait it continues at the mark itself, because readers may have to hold the bytes between the marks. */
const GIVE_WAY_MS = 1000;
const SHORTEST_PAUSE_MS = 5;
const LONGEST_PAUSE_MS = 500;

/** Return the largest block. A larger one than the reserved quarter could wait for ever. */
export function largestBlock(budgetBytes: number): number {
  return Math.floor(budgetBytes * (1 - ORDINARY_SHARE));
}

/** The plain values that decide about one block of one shard. */
export interface QuotaState {
  readonly heldBytes: number;
  readonly blockBytes: number;
  /** The partition's part of the budget. */
  readonly budgetBytes: number;
  /** Whether this shard is the lowest unfinished one of the oldest unfinished epoch of its partition. */
  readonly isNext: boolean;
  /** The time since its mark made it wait, or null. */
  readonly waitedMs: number | null;
  /** The partition, or null if the stream has one alone. */
  readonly partition: number | null;
  /** The server's memory that writers may still use, or null without a limit. */
  readonly leftBytes: number | null;
}

/** The decision about one block: it is admitted, or why it waits. */
export type Decision =
  | "admitted"
  /** The server refused a write at its maxmemory. */
  | "server full"
  /** The block fits the budget, and not what the server's memory leaves to writers. */
  | "memory short"
  /** What is free is reserved for an earlier shard. */
  | "reserved"
  | "budget full";

/** The word for a reason to wait in a note on the roster. */
export function lacking(decision: Decision): "memory" | "budget" {
  return decision === "server full" || decision === "memory short" ? "memory" : "budget";
}

/** Decide about one block. One that the server refused waits a round, even if the quota would admit it. */
export function decide(state: QuotaState, isRefused = false): Decision {
  if (isRefused) return "server full";
  if (isEnough(state)) return "admitted";
  if (isEnough({ ...state, leftBytes: null })) return "memory short";
  return isEnough({ ...state, isNext: true }) ? "reserved" : "budget full";
}

/** Return whether the block may be written. */
export function isEnough(state: QuotaState): boolean {
  return state.heldBytes + state.blockBytes <= markBytes(state);
}

/** Return how many bytes have to be freed before the block may be written. */
export function missingBytes(state: QuotaState): number {
  return Math.max(0, state.heldBytes + state.blockBytes - markBytes(state));
}

/** Return up to how many bytes this shard may fill the budget now: for a while after it waited, the low mark. */
export function markBytes(state: QuotaState): number {
  const { isNext, waitedMs } = state;
  const effective = effectiveBytes(state);
  const high = isNext ? effective : Math.floor(effective * ORDINARY_SHARE);
  return waitedMs === null || waitedMs >= GIVE_WAY_MS ? high : high - Math.floor(effective * LOW_SHARE);
}

/** Return the budget, or as much of it as the server's memory allows. */
function effectiveBytes({ budgetBytes, heldBytes, leftBytes }: QuotaState): number {
  return leftBytes === null ? budgetBytes : Math.max(0, Math.min(budgetBytes, heldBytes + leftBytes));
}

/** The time that a shard has waited. Each function returns the value after one step. */
export interface WaitTimes {
  /** When the shard began to wait, or null once a block was admitted. */
  readonly closedAt: number | null;
  /** When the server began to refuse one try after another. Each try looks like the end of a wait. */
  readonly refusedAt: number | null;
  /** The length of the wait before. */
  readonly lastMs: number;
  /** Whether the last decision admitted a block. The server or the folder may refuse it. */
  readonly wasAdmitted: boolean;
}

export const NO_WAIT: WaitTimes = { closedAt: null, refusedAt: null, lastMs: 0, wasAdmitted: false };

/** Return the time since the wait, or a series of refused tries, began. Null if there is neither. */
export function waitedMs({ closedAt, refusedAt }: WaitTimes, now: number): number | null {
  const began = [closedAt, refusedAt].filter((at) => at !== null);
  return began.length > 0 ? now - Math.min(...began) : null;
}

/** Return the value as a decision begins. A try that was not refused ends a series of refused ones. */
export function waitBegun(wait: WaitTimes, now: number, isRefused: boolean): WaitTimes {
  const refusedAt = wait.wasAdmitted && !isRefused ? null : wait.refusedAt;
  return { ...wait, refusedAt: isRefused ? (refusedAt ?? now) : refusedAt, wasAdmitted: false };
}

/** Return the value after a block was not admitted. */
export function waitClosed(wait: WaitTimes, now: number): WaitTimes {
  return { ...wait, closedAt: wait.closedAt ?? now };
}

/** Return the value after a block was admitted. */
export function waitAdmitted(wait: WaitTimes, now: number): WaitTimes {
  return { ...wait, closedAt: null, lastMs: waitedMs(wait, now) ?? wait.lastMs, wasAdmitted: true };
}

/** Return the time before the next look. A wait takes few looks, however long it gets. */
export function pauseMs(waited: number, last: number): number {
  return Math.min(LONGEST_PAUSE_MS, Math.max(SHORTEST_PAUSE_MS, waited / 2, last / 4));
}
