// The options of a loader: their defaults and checks, and the `LoaderState` that says where a loader stands.

import { createHash } from "node:crypto";
import { hostname } from "node:os";
import { BadOption, StateMismatch } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { SERVER_OPTIONS, type ServerOptions } from "../server/client.js";
import { checkedName } from "../stream/keys.js";
import { type Order, rankMember } from "../stream/roster.js";
import type { Stream } from "../stream/stream.js";
import { type Notify, toStderr } from "../waiting.js";
import { whole } from "../whole.js";
import type { Spec } from "../wire/spec.js";
import type { Start } from "./member.js";

const PREFETCH_BYTES = 64 * 2 ** 20;
const LEASE_MS = 30_000;
/** A shorter one would lapse between two renewals. */
const SHORTEST_LEASE_MS = 100;
const STATE_VERSION = 1;

/** When a batch counts as trained on: when the loop asks for the next one, or when `ack()` is called. */
export type Acknowledge = "next" | "manual";

/** How a group is joined and read. */
export interface LoaderOptions extends ServerOptions {
  /** A token makes it a reader of a gateway: see `GatewayOptions`. */
  readonly token?: never;
  /** The group's name. Each training job has a group of its own. */
  readonly group: string;
  /** The samples of a batch; in canonical order, of a batch of each rank. */
  readonly batchSize: number;
  /**
   * 'resume' continues where the group stands. 'remaining' does so also if epochs were released before the group read
   * them: it goes on without those. If one lost only a part of its entries, the group goes on behind it. 'earliest', or
   * an epoch, makes the group read again from there.
   */
  readonly start?: Start;
  /** Whether a group that does not exist is made. Default true. */
  readonly create?: boolean;
  /** Whether a stream that does not exist is waited for. Default true. */
  readonly wait?: boolean;
  /** When a batch counts as trained on. Default 'next'. */
  readonly acknowledge?: Acknowledge;
  /** Makes this loader one rank of a group in canonical order, with `worldSize`. The number of this rank, from 0. */
  readonly rank?: number;
  /** The number of ranks. Each position of an epoch belongs to one of them. */
  readonly worldSize?: number;
  /**
   * Whether ranks leave out a last step that the epoch does not fill. Otherwise several ranks fill it with the epoch's
   * first samples, and one rank alone gets a smaller batch. Default false.
   */
  readonly dropLast?: boolean;
  /** What `state()` returned. In canonical order the next batch is the one behind it. */
  readonly state?: LoaderState;
  /** The name of this process in the group. Default host and process id. */
  readonly member?: string;
  /** The longest wait for a batch or an epoch. Default no limit, and 60 s for a stream or a first epoch. */
  readonly timeoutMs?: number;
  /** The payload bytes that are read ahead. Default 64 MiB. */
  readonly prefetchBytes?: number;
  /** The time after which others may take what this process holds, if it is silent. Default 30,000. */
  readonly leaseMs?: number;
  /** Compare each payload with its checksum. Default true. */
  readonly checksum?: boolean;
  /** Takes each line for the user. Default stderr. */
  readonly notify?: Notify;
}

const OPTIONS = {
  group: true,
  batchSize: true,
  start: true,
  create: true,
  wait: true,
  acknowledge: true,
  rank: true,
  worldSize: true,
  dropLast: true,
  state: true,
  member: true,
  timeoutMs: true,
  prefetchBytes: true,
  leaseMs: true,
  checksum: true,
  notify: true,
  ...SERVER_OPTIONS,
  token: true,
} satisfies OptionNames<LoaderOptions>;

/** Where a loader stands. It can be stored as JSON. Python's `Loader.state_dict()` has the same fields. */
export interface LoaderState {
  readonly version: number;
  readonly stream: string;
  readonly stream_id: string;
  readonly spec: string;
  readonly group: string;
  readonly kind: "shared" | "ordered";
  readonly batch_size: number;
  readonly loader?: string;
  /** The epoch of the batch that was delivered last; of a rank the epoch of the next one. */
  readonly epoch: number | null;
  /** The batches and samples that the loader delivered. */
  readonly batches: number;
  readonly samples: number;
  /** Of a rank: where its next step begins, in planned samples of the epoch. */
  readonly position?: number;
  /** Of a rank: the id of the manifest of the epoch that it read last, if it is known. */
  readonly manifest?: string | null;
}

/** The options of a loader, checked. */
export interface Chosen {
  readonly group: string;
  readonly member: string;
  readonly batchSize: number;
  readonly start: Start;
  readonly create: boolean;
  readonly wait: boolean;
  readonly acknowledge: Acknowledge;
  readonly order: Order | null;
  readonly remainder: Remainder;
  readonly timeoutMs: number | null;
  readonly prefetchBytes: number;
  readonly leaseMs: number;
  readonly checksum: boolean;
  readonly notify: Notify;
}

/** An epoch, and the position in it where a rank's next step begins. */
export interface RankPlace {
  readonly epoch: number;
  readonly position: number;
  /** The id of the manifest of the epoch that was read last, if it is known. */
  readonly manifest: string | null;
}

/** What becomes of a last step that the epoch does not fill. */
export type Remainder = "pad" | "drop" | "keep";

/** Return the options with their defaults. Raises BadOption, BadName. */
export function chosen(options: LoaderOptions): Chosen {
  checkOptions("load", options, OPTIONS, '{ group: "resnet", batchSize: 64 }');
  const { start = "resume", acknowledge = "next", leaseMs = LEASE_MS, prefetchBytes = PREFETCH_BYTES } = options;
  const isWord = start === "resume" || start === "remaining" || start === "earliest";
  if (!isWord && !(Number.isSafeInteger(start) && start >= 0)) {
    throw new BadOption(
      `start is ${String(start)}, expected 'resume', 'remaining', 'earliest' or an epoch's number; for new samples ` +
        "alone, the last number of `penstock epochs list`, plus 1",
    );
  }
  if (acknowledge !== "next" && acknowledge !== "manual") {
    throw new BadOption(`acknowledge is '${String(acknowledge)}', expected 'next' or 'manual'`);
  }
  const batchSize = whole("batchSize", options.batchSize, 1);
  const order = orderOf(options, batchSize);
  return {
    group: checkedName("group", options.group),
    member: order === null ? checkedName("member", options.member ?? defaultMember()) : rankMember(order.rank),
    batchSize,
    start,
    create: options.create ?? true,
    wait: options.wait ?? true,
    acknowledge,
    order,
    remainder: options.dropLast ? "drop" : order !== null && order.world > 1 ? "pad" : "keep",
    timeoutMs: options.timeoutMs === undefined ? null : whole("timeoutMs", options.timeoutMs, 1),
    prefetchBytes: whole("prefetchBytes", prefetchBytes, 1),
    leaseMs: whole("leaseMs", leaseMs, SHORTEST_LEASE_MS),
    checksum: options.checksum ?? true,
    notify: options.notify ?? toStderr,
  };
}

function orderOf({ rank, worldSize, dropLast, member }: LoaderOptions, batch: number): Order | null {
  if (rank === undefined && worldSize === undefined) {
    if (dropLast) throw new BadOption("dropLast goes with rank and worldSize");
    return null;
  }
  if (rank === undefined || worldSize === undefined) {
    throw new BadOption("rank and worldSize go together: this process's number from 0, and the number of ranks");
  }
  whole("worldSize", worldSize, 1);
  whole("rank", rank, 0);
  if (rank >= worldSize) {
    throw new BadOption(`rank is ${rank} of worldSize ${worldSize}, expected 0 to ${worldSize - 1}`);
  }
  if (member !== undefined) {
    throw new BadOption("a rank's member name is its number: leave member out with rank and worldSize");
  }
  return { rank, world: worldSize, batch };
}

/** Host and process: two processes of a host are two members. */
function defaultMember(): string {
  const host = hostname()
    .replace(/[^A-Za-z0-9.-]/g, "-")
    .slice(0, 80);
  return `${host || "host"}-${process.pid}`;
}

/** Return what a state of a loader is compared by. */
export function identityOf(stream: Stream, spec: Spec, { group, order, batchSize }: Chosen) {
  return {
    version: STATE_VERSION,
    stream: stream.name,
    stream_id: stream.id,
    spec: specDigest(spec),
    group,
    kind: order === null ? "shared" : "ordered",
    batch_size: batchSize,
  } as const;
}

/** A name for a spec: equal specs have equal ones, and Python gives the same. */
function specDigest(spec: Spec): string {
  const tensors = spec.map(({ name, dtype, shape }) => {
    const sizes = shape.map((size) => (size === null ? "null" : String(size)));
    return `${JSON.stringify(name)}: [${JSON.stringify(dtype)}, [${sizes.join(", ")}]]`;
  });
  return createHash("sha256")
    .update(`{${tensors.join(", ")}}`)
    .digest("hex")
    .slice(0, 16);
}

const HINTS = {
  version: "pass what state() returned, as it was",
  stream: "load it into a loader of that stream",
  stream_id:
    "the stream was made again since, by a `penstock run` or after a deletion: begin without this state; to resume, " +
    "keep one `penstock server` and run `penstock produce` beside it",
  spec: "the stream's tensors differ from those the state was taken with",
  group: "another group has another position: use the same group, or begin without this state",
  kind: "give the loader rank and worldSize if it had them",
  batch_size: "positions are counted in batches: give the loader the batchSize it had",
} as const;

/**
 * Return where a rank continues by a state, or null in a shared group.
 *
 * @throws StateMismatch unless the state is of the same stream, spec, group, way of reading and batch size.
 */
export function checkState(state: LoaderState, own: ReturnType<typeof identityOf>): RankPlace | null {
  for (const [what, hint] of Object.entries(HINTS)) {
    const [found, expected] = [state[what as keyof LoaderState], own[what as keyof typeof own]];
    if (found !== expected) throw mismatch(what, found, expected, hint);
  }
  if (own.kind === "shared") return null;
  for (const [what, unit] of [
    ["epoch", 1],
    ["position", own.batch_size],
  ] as const) {
    const found = state[what];
    if (!Number.isSafeInteger(found) || (found as number) < 0 || (found as number) % unit !== 0) {
      throw mismatch(what, found, unit === 1 ? "an epoch" : `batches of ${unit}`, HINTS.version);
    }
  }
  return { epoch: state.epoch as number, position: state.position as number, manifest: state.manifest ?? null };
}

function mismatch(what: string, found: unknown, expected: unknown, hint: string): StateMismatch {
  return new StateMismatch(
    `this state has ${what} ${JSON.stringify(found)}, the loader ${JSON.stringify(expected)}: ${hint}`,
  );
}
