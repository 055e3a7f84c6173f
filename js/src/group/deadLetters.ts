// Entries that cannot be read: which become dead letters, which do not, when a reader gives up, and the notice on a
// suspect.

import { type BadEntry, SegmentGone, TooManyDeadLetters, UncommittedEntry, UnsupportedVersion } from "../errors.js";
import { bytesOf, textOf } from "../server/client.js";
import type { PartitionKeys } from "../stream/keys.js";
import { bury, ledgerBits, uncovered } from "../stream/ledger.js";
import { liveState, type Manifest, plannedSamples } from "../stream/manifest.js";
import type { Membership } from "../stream/roster.js";
import type { Notify } from "../waiting.js";
import type { Header } from "../wire/header.js";
import { MAX_HEADER_BYTES } from "../wire/limits.js";
import type { ClaimedEntry } from "./heartbeat.js";
import { Lease } from "./leases.js";
import type { Member } from "./member.js";
import type { BadReceived } from "./receive.js";

/** So many bad entries before the first good one are no accident: the reader or the whole epoch is broken. */
const HOPELESS_ENTRIES = 100;

interface Held {
  readonly manifest: Manifest;
  readonly partition: PartitionKeys;
  readonly entryId: string;
  readonly reason: string;
}

/** Return whether an entry is bad only since the group is done with all of it, or its epoch is over. */
export async function isDone(
  member: Member,
  partition: PartitionKeys,
  manifest: Manifest,
  { error, header, entryId }: BadReceived,
): Promise<boolean> {
  const isUncommitted = error instanceof UncommittedEntry;
  if (!(isUncommitted || error instanceof SegmentGone) || header === null) return false;
  const state = textOf(await member.server.call("GET", partition.state(manifest.epoch)));
  if (isUncommitted) {
    if (state === null || state.startsWith("gone:")) return true;
    const keys = [partition.entries(manifest.epoch)];
    const found = (await member.server.run("read_headers", keys, [MAX_HEADER_BYTES, entryId])) as unknown[];
    return found.length === 1 && bytesOf(found[0]).length === 0; // the server forgot it together with its record
  }
  if (state !== liveState(manifest)) return true;
  const { shard, first, end, holes } = header;
  const { group } = member.who;
  const bits = await ledgerBits(member.server, partition, manifest.epoch, group, shard, [first, end]);
  for (const hole of holes) bits[hole - first] = true;
  return !bits.includes(false);
}

/** Return the error of a reader that does not know the form of an entry. It has taken nothing of it. */
export function notReadHere(who: Membership, epoch: number, entryId: string, error: BadEntry): UnsupportedVersion {
  return new UnsupportedVersion(
    `entry ${entryId} of epoch ${epoch} of '${who.stream.name}', which is kept for group '${who.group}', cannot be ` +
      `read here: ${error.message}`,
  );
}

/** What the readers of one epoch know together. */
export interface EpochKnowledge {
  /** Whether an entry could be read: what could not be is bad in itself. */
  isReadable: boolean;
  /** Whether the user was told that it was released while it was read. */
  isReleaseTold: boolean;
}

/** The bad entries that one reader finds in one epoch. */
export class DeadLetters {
  readonly #member: Member;
  readonly #notify: Notify;
  readonly #known: EpochKnowledge;
  readonly #held: Held[] = [];
  #gaveUp = false;

  constructor(member: Member, notify: Notify, known: EpochKnowledge) {
    this.#member = member;
    this.#notify = notify;
    this.#known = known;
  }

  /** Note that an entry could be read: what could not be is bad in itself. */
  async sawGood(): Promise<void> {
    this.#known.isReadable = true;
    await this.#addHeld();
  }

  /** Make an entry a dead letter, or hold it back while nothing could be read. */
  async bury(manifest: Manifest, partition: PartitionKeys, entryId: string, reason: string): Promise<void> {
    if (this.#known.isReadable) return await this.addNow(manifest, partition, entryId, reason);
    // held like any other, so that it is renewed, and handed back when this reader gives up
    this.#member.leases.add(new Lease(partition.number, manifest.epoch, -1, entryId, 0));
    this.#held.push({ manifest, partition, entryId, reason });
  }

  /** Raise TooManyDeadLetters, once, when too much is held back. */
  requireHope(): void {
    if (this.#held.length < HOPELESS_ENTRIES || this.#gaveUp || this.#known.isReadable) return;
    this.#gaveUp = true;
    throw this.#hopeless(`none of the first ${this.#held.length} entries`);
  }

  /** Make an entry a dead letter. */
  async addNow(manifest: Manifest, partition: PartitionKeys, entryId: string, reason: string): Promise<void> {
    const { server, who, leases } = this.#member;
    this.#notify(`entry ${entryId} of epoch ${manifest.epoch} is a dead letter: ${reason.slice(0, 300)}`);
    await bury(server, partition, manifest, who.group, entryId, reason.slice(0, 500));
    leases.remove(partition.number, manifest.epoch, [entryId]);
  }

  /** End the epoch: what is held back is buried, unless nothing at all of the epoch could be read by anyone. */
  async end(manifest: Manifest, isAlone: boolean): Promise<void> {
    if (this.#held.length === 0) return;
    if (isAlone && !this.#known.isReadable && (await this.#isNothingDone(manifest)))
      throw this.#hopeless(`none of the ${this.#held.length} entries`);
    await this.#addHeld();
  }

  async #isNothingDone(manifest: Manifest): Promise<boolean> {
    const { server, who } = this.#member;
    const rest = await uncovered(server, who.stream, manifest, who.group);
    const samples = plannedSamples(manifest);
    return Boolean(samples) && rest.reduce((sum, { lo, hi }) => sum + hi - lo, 0) === samples;
  }

  async #addHeld(): Promise<void> {
    for (let bad = this.#held[0]; bad !== undefined; bad = this.#held[0]) {
      await this.addNow(bad.manifest, bad.partition, bad.entryId, bad.reason);
      this.#held.shift();
    }
  }

  #hopeless(which: string): TooManyDeadLetters {
    const gone = this.#held.filter(({ reason }) => reason.startsWith("SegmentGone")).at(-1);
    const { entryId, reason, manifest } = gone ?? (this.#held.at(-1) as Held);
    const { stream, group } = this.#member.who;
    const drop = `penstock bad drop ${stream.name} ${manifest.epoch} [ENTRY] --group ${group}`;
    const advice =
      gone === undefined
        ? `is this penstock of the producer's version? To go on without them: \`${drop}\`; without ENTRY it takes all ` +
          "that no producer committed"
        : "files of payloads are gone or damaged, and no reader brings them back. To make the samples again: " +
          `\`penstock audit ${stream.name} --repair SOURCE...\`. To go on without them: \`${drop}\`; without ENTRY it ` +
          "takes all that are lost";
    return new TooManyDeadLetters(
      `${which} of epoch ${manifest.epoch} of '${stream.name}' could be read, one of them (${entryId}): ` +
        `${reason.slice(0, 300)}. Nothing was buried, they stay pending for group '${group}': ${advice}`,
    );
  }
}

/** Return the notice on an entry that was delivered often and never acknowledged. */
export function crashNotice(who: Membership, { entry }: ClaimedEntry, header: Header | null): string {
  const { entryId, epoch, deliveries } = entry;
  const what = header === null ? "" : ` (shard ${header.shard} offsets ${header.first}-${header.end - 1})`;
  return (
    `entry ${entryId} of epoch ${epoch}${what} was given out ${deliveries} times to group '${who.group}' and never ` +
    "acknowledged: does training die on it? It is handed out once more, alone and last; to go on without it: " +
    `\`penstock bad drop ${who.stream.name} ${epoch} ${entryId} --group ${who.group}\``
  );
}
