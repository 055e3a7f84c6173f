// A rank of an ordered group, as a member: it joins, acknowledges by position, goes back to a position, and closes
// epochs.

import { setTimeout as sleep } from "node:timers/promises";
import { GroupBusy, ReplayTruncated, StateMismatch, WaitTimeout } from "../errors.js";
import type { Server } from "../server/client.js";
import { findManifest, isEnded, type Manifest, plannedSamples, retainedEpochs } from "../stream/manifest.js";
import {
  knownPositions,
  lowestPosition,
  positionOf,
  positionReport,
  report,
  rewind,
  runAsRank,
} from "../stream/positions.js";
import { joinGroup, loadRoster, type Membership, type Order, rankMember } from "../stream/roster.js";
import { readCounters } from "../stream/stream.js";
import { type Notify, type Outage, Wait } from "../waiting.js";
import type { LoaderBatch } from "./batch.js";
import { Member, type Start } from "./member.js";
import type { RankPlace } from "./options.js";
import type { RunScript } from "./outbox.js";

const JOIN_EVERY_MS = 200;
const IS_OLDER =
  "the server came back from before the state was taken, as from a backup: load a checkpoint of that time, or begin " +
  "without this state";

/** Return the last epoch of which something was read before a position. */
function lastRead(epoch: number, position: number): number {
  return position > 0 ? epoch : epoch - 1;
}

/** The end of an epoch that was read to its end. */
interface EpochEnd {
  /** The end of its last step. */
  readonly last: number;
  /** The position that is reported once all up to `last` is acknowledged. */
  readonly reported: number;
}

/** A rank of an ordered group. Its claim on samples is by position. */
export class RankMember extends Member {
  readonly order: Order;
  readonly #notify: Notify;
  readonly #quietMs: number;
  /** Epoch to the position up to which everything of this rank is acknowledged. */
  readonly #acknowledged = new Map<number, number>();
  readonly #ends = new Map<number, EpochEnd>();
  /** Epoch to its manifest's id, of the newest epochs that were read here. */
  readonly #ids = new Map<number, string>();

  /** @param quietMs Ranks of another world size that were unseen for so long are gone. */
  constructor(
    server: Server,
    who: Membership,
    outage: Outage,
    notify: Notify,
    isClosed: () => boolean,
    quietMs: number,
  ) {
    super(server, who, outage, notify, isClosed);
    this.order = who.order as Order;
    this.#notify = notify;
    this.#quietMs = quietMs;
  }

  protected override runAcknowledgement(...call: Parameters<RunScript>): Promise<unknown> {
    return runAsRank(this.server, this.who, this.begin, ...call);
  }

  // --- joining ---

  /**
   * See `Member.join`. With 'earliest' or an epoch this rank alone reads again.
   *
   * @throws GroupKindMismatch, EpochsReleased, or GroupBusy if ranks of another world size are alive.
   */
  override async join(start: Start): Promise<void> {
    this.first = await this.#enter(await this.floorOf(start), start !== "resume");
    if (start === "resume" || start === "remaining") return;
    const roster = await loadRoster(this.server, this.begin);
    await this.rewind(typeof start === "number" ? start : await this.firstWhole(roster), 0);
  }

  async #enter(first: number, force: boolean): Promise<number> {
    const wait = new Wait(this.#notify, 2 * this.#quietMs);
    for (;;) {
      try {
        return await this.onReplicas(() => joinGroup(this.server, this.who, { first, force, quietMs: this.#quietMs }));
      } catch (busy) {
        if (!(busy instanceof GroupBusy)) throw busy;
        // a rank that died a moment ago looks alive for a moment
        await wait
          .because("ranks", () => busy.message)
          .catch((error) => {
            throw error instanceof WaitTimeout ? busy : error;
          });
      }
      await sleep(JOIN_EVERY_MS);
    }
  }

  // --- positions ---

  /** Return where this rank's next step begins, as the server knows it. */
  async position(epoch: number): Promise<number> {
    const positions = await knownPositions(this.server, this.stream, epoch, this.who.group);
    return positionOf(positions, this.order.rank);
  }

  /** Return the ranks that are not there and have acknowledged nothing of an epoch. */
  async absentRanks(epoch: number): Promise<number[]> {
    const { members } = await loadRoster(this.server, this.begin);
    const { ranks } = await knownPositions(this.server, this.stream, epoch, this.who.group);
    const here = new Set(members.filter(({ group }) => group === this.who.group).map(({ member }) => member));
    return Array.from({ length: this.order.world }, (_, rank) => rank).filter(
      (rank) => rank !== this.order.rank && !ranks.has(rank) && !here.has(rankMember(rank)),
    );
  }

  /** Remember the manifest's id for states that rest on the epoch. */
  noteManifest({ epoch, id }: Pick<Manifest, "epoch" | "id">): void {
    this.#ids.set(epoch, id);
    for (const known of this.#ids.keys()) if (known < epoch - 1) this.#ids.delete(known);
  }

  /** Return the id of the manifest of the last epoch that was read before a position, or null if it is not known. */
  manifestAt(epoch: number, position: number): string | null {
    return this.#ids.get(lastRead(epoch, position)) ?? null;
  }

  /**
   * Move this rank to a position in an epoch, to the start of later epochs, and to the end of earlier ones.
   *
   * @throws ReplayTruncated if something of it may be gone.
   */
  async rewind(epoch: number, position: number): Promise<void> {
    await this.flush();
    this.outboxes.forget();
    const retained = [...(await retainedEpochs(this.server, this.stream)).keys()];
    if (!retained.includes(epoch) && epoch < (await readCounters(this.server, this.stream)).next) {
      throw new ReplayTruncated(
        `epoch ${epoch} of '${this.stream.name}' was released, so it cannot be gone back to; retained: ` +
          `${retained.join(", ") || "none"}`,
      );
    }
    for (const number of retained) {
      const manifest = await findManifest(this.server, this.stream, number);
      if (manifest === null || manifest.state === "abandoned") continue;
      if (number < epoch) await this.#skip(manifest);
      else await this.#goBack(manifest, number === epoch ? position : 0);
      this.#acknowledged.delete(number);
      this.#ends.delete(number);
    }
    this.first = Math.min(this.first, epoch);
  }

  /**
   * Require that the server knows what was read before a state was taken.
   *
   * @throws StateMismatch if it does not, or if it has other samples in its place.
   */
  async requireRead({ epoch, position, manifest: manifestId }: RankPlace): Promise<void> {
    const last = lastRead(epoch, position);
    const begun = (await readCounters(this.server, this.stream)).next;
    if (epoch > this.first && last >= begun) {
      throw new StateMismatch(
        `this state has epoch ${epoch}, the loader ${begun}: the next epoch that is made has number ${begun}: ${IS_OLDER}`,
      );
    }
    if (manifestId === null || last < 0) return;
    const found = await findManifest(this.server, this.stream, last);
    if (found !== null && found.id !== manifestId) {
      throw new StateMismatch(
        `this state has manifest '${manifestId}', the loader '${found.id}': epoch ${last} was made again since: ${IS_OLDER}`,
      );
    }
    this.noteManifest({ epoch: last, id: manifestId });
  }

  async #skip(manifest: Manifest): Promise<void> {
    const samples = plannedSamples(manifest);
    if (manifest.epoch < this.first || samples === null) return;
    await report(this.server, this.who, manifest, samples);
    this.unclosed.add(manifest.epoch);
  }

  /** Move the rank back, unless it stands there already. */
  async #goBack(manifest: Manifest, position: number): Promise<void> {
    if ((await this.position(manifest.epoch)) !== position) await rewind(this.server, this.who, manifest, position);
  }

  /** Return the lowest epoch above `after` that this rank has not read. */
  override async nextEpoch(after: number): Promise<number | null> {
    for (let above = after; ; ) {
      const epoch = await super.nextEpoch(above);
      if (epoch === null || !(await this.#hasRead(epoch))) return epoch;
      this.unclosed.add(epoch); // other ranks have not read it
      above = epoch;
    }
  }

  async #hasRead(epoch: number): Promise<boolean> {
    const manifest = await findManifest(this.server, this.stream, epoch);
    const samples = manifest === null ? null : plannedSamples(manifest);
    return Boolean(samples) && (await this.position(epoch)) >= (samples as number);
  }

  // --- acknowledging ---

  /** Note that an epoch is read from a position on. All below it is acknowledged. */
  begins(epoch: number, position: number): void {
    this.#acknowledged.set(epoch, Math.max(position, this.#acknowledged.get(epoch) ?? 0));
  }

  /** Acknowledge everything of this rank up to and with this batch. */
  override async acknowledge({ epoch, position }: LoaderBatch): Promise<Promise<void>[]> {
    this.begins(epoch, position);
    await this.outboxes.hasRoom([this.begin]);
    const manifest = await this.manifestOf(epoch);
    if (manifest === null) return []; // released: nothing is left to acknowledge
    return [this.outboxes.send(this.begin, "report_position", ...positionReport(this.who, manifest, position))];
  }

  /** Note that the epoch was read to its end: once all up to `last` is acknowledged, all `total` positions are. */
  ended(epoch: number, last: number, total: number): void {
    this.#ends.set(epoch, { last, reported: Math.max(last, total) });
  }

  /** Return whether no step of an epoch that was read to its end is behind this position. */
  isEnd(epoch: number, position: number): boolean {
    return position >= (this.#ends.get(epoch)?.last ?? 0);
  }

  override hasUnacknowledged(epoch: number): boolean {
    return (this.#acknowledged.get(epoch) ?? 0) < (this.#ends.get(epoch)?.last ?? 0);
  }

  protected override async close(epoch: number): Promise<boolean> {
    const { stream, group } = this.who;
    const manifest = await findManifest(this.server, stream, epoch);
    if (manifest === null || manifest.state === "abandoned") return true;
    const end = this.#ends.get(epoch);
    if (end !== undefined && !this.hasUnacknowledged(epoch)) {
      await report(this.server, this.who, manifest, end.reported);
    }
    const lowest = lowestPosition(await knownPositions(this.server, stream, epoch, group), this.order.world);
    if (!isEnded(manifest) || lowest < (plannedSamples(manifest) ?? 0)) return false;
    await this.closeForGroup(epoch);
    this.#ends.delete(epoch);
    return true;
  }
}
