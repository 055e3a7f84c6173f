// A joined member with its heartbeat and the epoch that it reads, in shared or in canonical order: it begins, ends and
// repeats epochs.

import { setTimeout as sleep } from "node:timers/promises";
import { EpochNotFound, GroupFinished } from "../errors.js";
import type { Server } from "../server/client.js";
import type { BlockingConnection } from "../stream/blockingConnection.js";
import { findManifest, loadManifest, type Manifest, plannedSamples } from "../stream/manifest.js";
import type { Membership } from "../stream/roster.js";
import { loadRoster, unknownGroup } from "../stream/roster.js";
import type { Notify, Outage, Wait } from "../waiting.js";
import type { LoaderBatch } from "./batch.js";
import { EpochSteps } from "./canonical.js";
import { DeliveryCheck } from "./deliveryCheck.js";
import { Heartbeat, Heartbeats, LeaseRenewer, LeaseRenewers } from "./heartbeat.js";
import { Member } from "./member.js";
import type { Chosen, LoaderState, RankPlace } from "./options.js";
import { OrderedReader } from "./orderedReader.js";
import { PrefetchLimit, PrefetchQueue } from "./queue.js";
import { RankMember } from "./rankMember.js";
import type { ReceiveOptions } from "./receive.js";
import { absentNotice, newGroupNotice, noStepNotice } from "./sentences.js";
import { SharedReaders } from "./sharedReader.js";

const LEASES_LOOK_MS = 20;
/** Ranks of another world size that were not seen for this part of a lease, five heartbeats, are gone. */
const QUIET_PER_LEASE = 6;
const LEAST_QUIET_MS = 1000;

/** A reader of one epoch, which fills a prefetch queue. */
export interface EpochReader {
  readonly epoch: number;
  /** A notice, if a server lost the epoch as a whole, else "". */
  readonly loss: string;
  /** Read to the end. Everything ends in the queue, errors too. */
  run(): Promise<void>;
  /** Return why there is no batch. */
  whyWaiting(ms: number): Promise<string>;
  /** Return whether no step of a rank begins at this position of the epoch or beyond. */
  isLast(position: number): boolean;
}

/** One epoch that is being read. */
export interface EpochRun {
  readonly reader: EpochReader;
  readonly queue: PrefetchQueue;
  /** Ends when the reader does. It raises nothing. */
  readonly ended: Promise<void>;
}

/** What a member reads with. */
export interface Resources {
  /** The control connection, whose commands fail while the server is away. */
  readonly server: Server;
  readonly connection: BlockingConnection;
  readonly outage: Outage;
  readonly receive: ReceiveOptions;
  readonly chosen: Chosen;
  /** Whether the loader was closed. */
  readonly isClosed: () => boolean;
  /** Where a rank is to continue, or null for where the group stands. */
  readonly place: RankPlace | null;
}

/** Where a loader stands: the epoch of the last batch; of a rank the epoch and the position of its next step. */
type Standing = Pick<LoaderState, "epoch" | "position" | "manifest">;

/** A joined member at work, with its heartbeat and the epoch being read. */
export abstract class Reading {
  abstract readonly member: Member;
  abstract readonly heartbeat: Heartbeats;
  /** Whether acknowledgement is by position: everything up to a batch. */
  abstract readonly isOrdered: boolean;
  run: EpochRun | null = null;
  /** The last epoch that was iterated to its end here. */
  cursor = -1;
  readonly #limit: PrefetchLimit;
  readonly #notify: Notify;

  constructor({ chosen }: Resources) {
    this.#notify = chosen.notify;
    this.#limit = new PrefetchLimit(chosen.prefetchBytes);
  }

  /** Join the group, and keep its member alive from now on. */
  abstract join(): Promise<void>;

  protected abstract readerOf(manifest: Manifest, queue: PrefetchQueue): EpochReader | Promise<EpochReader>;

  /** Return the next epoch, or null if there is none yet. Raises GroupFinished. */
  async nextEpoch(): Promise<number | null> {
    return await this.member.nextEpoch(this.cursor);
  }

  async #start(epoch: number): Promise<void> {
    const queue = new PrefetchQueue(this.#limit);
    const manifest = await loadManifest(this.member.server, this.member.stream, epoch);
    this.member.learn(manifest);
    const reader = await this.readerOf(manifest, queue);
    this.heartbeat.readEpoch(epoch);
    this.run = { reader, queue, ended: reader.run() };
  }

  /**
   * Start reading an epoch.
   *
   * @returns False if it is gone since it was found: the others of the group acknowledged it, or it was lost.
   * @throws EpochNotFound if it is gone for another reason.
   */
  async begin(epoch: number): Promise<boolean> {
    try {
      await this.#start(epoch);
    } catch (error) {
      if (!(error instanceof EpochNotFound)) throw error;
      const loss = await this.member.lossOf(epoch);
      if (loss !== "") {
        this.#notify(loss);
        return false;
      }
      if (this.isOrdered || !(await this.member.isReleased(epoch))) throw error;
      this.cursor = Math.max(this.cursor, epoch);
      return false;
    }
    return true;
  }

  /** End an epoch that was read to its end. A cursor below it means that something of it is still due. */
  async finish(run: EpochRun): Promise<void> {
    await run.ended;
    this.run = null;
    const { epoch, loss } = run.reader;
    if (loss !== "") {
      this.#notify(loss);
      this.member.forget(epoch);
      return;
    }
    this.cursor = Math.max(this.cursor, epoch);
  }

  /** Stop reading, with everything that was read ahead. */
  async stop(): Promise<void> {
    const { run } = this;
    run?.queue.stop();
    await run?.ended;
    this.run = null;
  }

  /** Return what a state says of the place behind a batch. */
  here(last: LoaderBatch | null): Standing {
    return { epoch: last?.epoch ?? null };
  }

  /** Find what is left for this member in an epoch that it has read and that did not close. */
  async takeUp(_epoch: number): Promise<void> {}

  /** Return whether the entries of a batch are known to be this member's still. */
  isFreshFor(_batch: LoaderBatch): boolean {
    return true;
  }

  /** Return once `isFreshFor` is true: a process that stood still may hold what another one has taken over. */
  async awaitLeases(batch: LoaderBatch, wait: Wait): Promise<void> {
    while (!this.isFreshFor(batch)) {
      await wait.because("leases", () => "the server, to renew the leases of what is handed out next");
      await sleep(LEASES_LOOK_MS);
      this.heartbeat.raiseError();
    }
  }
}

/** Reading through a consumer group. Entries that were handed back, or left by the dead, are claimed and read again. */
export class SharedReading extends Reading {
  override readonly member: Member;
  override readonly heartbeat: LeaseRenewers;
  override readonly isOrdered = false;
  readonly #made: Resources;
  /** One for each heartbeat. */
  readonly #deliveries: DeliveryCheck[];
  #readers: SharedReaders | null = null;

  constructor(made: Resources, who: Membership) {
    super(made);
    this.#made = made;
    const { server, outage, chosen, isClosed } = made;
    this.member = new Member(server, who, outage, chosen.notify, isClosed);
    const { leases, servers } = this.member;
    const { leaseMs, notify } = chosen;
    this.heartbeat = new LeaseRenewers(
      servers.map((partitions) => new LeaseRenewer(server, who, leases, leaseMs, notify, partitions)),
      (from, other) => this.#split(from, other),
    );
    this.#deliveries = servers.map((partitions) => new DeliveryCheck(made.connection.server, partitions));
  }

  /** Join the group, and find what an earlier process of this name was given. */
  override async join(): Promise<void> {
    await this.member.patiently(() => Promise.all(this.#deliveries.map((check) => check.look())));
    await this.member.join(this.#made.chosen.start);
    await this.member.patiently(() => this.heartbeat.recover());
    await this.member.patiently(() => this.heartbeat.look());
    this.heartbeat.start();
  }

  /** Give moved partitions a reader and an outbox of their own. */
  #split(from: LeaseRenewer, other: LeaseRenewer): void {
    const { each } = this.heartbeat;
    const deliveries = (this.#deliveries[each.indexOf(from)] as DeliveryCheck).split(other.partitions);
    this.#deliveries.push(deliveries);
    this.member.split(other.partitions);
    this.#readers?.add(other, deliveries);
  }

  protected override readerOf(manifest: Manifest, queue: PrefetchQueue): EpochReader {
    const { member, heartbeat } = this;
    const { connection, receive, chosen } = this.#made;
    const { batchSize, notify } = chosen;
    const renewers = heartbeat.each;
    const made = { member, renewers, deliveries: this.#deliveries, connection, receive, batchSize, notify };
    this.#readers = new SharedReaders(made, manifest, queue);
    return this.#readers;
  }

  /** Return an earlier epoch again if a member that held a part of it died, or if what it lacked was repaired. */
  override async nextEpoch(): Promise<number | null> {
    const repaired: number[] = [];
    for (const epoch of this.member.unclosed) if (await this.member.hasUnread(epoch)) repaired.push(epoch - 1);
    this.#goBack(repaired);
    const found = await super.nextEpoch();
    this.heartbeat.expectMembers(this.member.members);
    return found;
  }

  override async takeUp(epoch: number): Promise<void> {
    await this.member.patiently(() => this.heartbeat.recover(() => this.member.isAllAcknowledged));
    // where a server came back as it was before it gave out entries
    this.#goBack((await this.member.hasUnread(epoch)) ? [epoch - 1] : []);
  }

  #goBack(epochs: readonly number[]): void {
    this.cursor = Math.min(this.cursor, ...this.heartbeat.claims.map(({ entry }) => entry.epoch - 1), ...epochs);
  }

  override isFreshFor(batch: LoaderBatch): boolean {
    return this.heartbeat.isFreshFor(batch);
  }
}

/** Reading by position, as one rank. */
export class OrderedReading extends Reading {
  override readonly member: RankMember;
  override readonly heartbeat: Heartbeats;
  override readonly isOrdered = true;
  readonly #made: Resources;
  /** Where this rank stands before its first batch. */
  #begin: Standing = { epoch: null };
  #isAbsenceTold = false;
  #isNoStepTold = false;

  constructor(made: Resources, who: Membership) {
    super(made);
    this.#made = made;
    const { server, outage, chosen, isClosed } = made;
    const quietMs = Math.max(LEAST_QUIET_MS, Math.floor(chosen.leaseMs / QUIET_PER_LEASE));
    this.member = new RankMember(server, who, outage, chosen.notify, isClosed, quietMs);
    this.heartbeat = new Heartbeats(
      this.member.servers.map((partitions) => new Heartbeat(server, who, chosen.leaseMs, partitions)),
      (_, other) => this.member.split(other.partitions),
    );
  }

  /** Join the group, and go to where a state was taken, if there is one. */
  override async join(): Promise<void> {
    const { chosen, place } = this.#made;
    await this.member.join(chosen.start);
    if (place !== null) {
      await this.member.requireRead(place);
      await this.member.rewind(place.epoch, place.position);
      this.cursor = place.epoch - 1;
    }
    this.#begin = place ?? (await this.#found());
    this.heartbeat.start();
  }

  async #found(): Promise<Standing> {
    try {
      const epoch = await this.nextEpoch();
      if (epoch === null) return { epoch: this.member.first, position: 0 };
      return { epoch, position: await this.member.position(epoch) };
    } catch (error) {
      if (error instanceof GroupFinished) return { epoch: null };
      throw error;
    }
  }

  protected override async readerOf(manifest: Manifest, queue: PrefetchQueue): Promise<EpochReader> {
    const { member, heartbeat } = this;
    const { connection, receive, chosen } = this.#made;
    const { remainder, notify } = chosen;
    member.noteManifest(manifest);
    const made = { member, heartbeat, connection, receive, remainder, notify };
    return await OrderedReader.open(made, manifest, await member.position(manifest.epoch), queue);
  }

  /** End an epoch, and say once if other ranks never came, or if the epoch has no step. */
  override async finish(run: EpochRun): Promise<void> {
    await super.finish(run);
    const { epoch } = run.reader;
    const { notify } = this.#made.chosen;
    const { who } = this.member;
    const isEmpty = run.reader instanceof OrderedReader && run.reader.isEmpty;
    const absent = this.#isAbsenceTold || isEmpty ? [] : await this.member.absentRanks(epoch);
    if (absent.length > 0) {
      this.#isAbsenceTold = true;
      notify(absentNotice(who, epoch, absent));
    }
    const manifest = this.#isNoStepTold ? null : await findManifest(this.member.server, who.stream, epoch);
    const samples = (manifest && plannedSamples(manifest)) ?? 0;
    const steps = new EpochSteps(0, this.member.order, this.#made.chosen.remainder);
    if (samples > 0 && steps.count(samples) === 0) {
      this.#isNoStepTold = true;
      notify(noStepNotice(who.stream.name, epoch, samples, steps.size));
    }
  }

  override here(last: LoaderBatch | null): Standing {
    const { epoch, position = 0 } = this.#standsAt(last);
    return epoch === null ? { epoch } : { epoch, position, manifest: this.member.manifestAt(epoch, position) };
  }

  #standsAt(last: LoaderBatch | null): Standing {
    if (last === null) return this.#begin;
    const { run } = this;
    const isRead = run === null || run.reader.epoch !== last.epoch;
    const isLast = isRead
      ? (last.epoch <= this.cursor || run !== null) && this.member.isEnd(last.epoch, last.position)
      : run.reader.isLast(last.position);
    return isLast ? { epoch: last.epoch + 1, position: 0 } : { epoch: last.epoch, position: last.position };
  }
}

/**
 * Join the group and keep its member alive from now on. A new group is announced if the stream has others.
 *
 * @throws GroupBusy, EpochsReleased, EpochNotFound, GroupKindMismatch or GroupNotFound.
 */
export async function openReading(made: Resources, who: Membership): Promise<Reading> {
  const { create, notify } = made.chosen;
  const reading = who.order === null ? new SharedReading(made, who) : new OrderedReading(made, who);
  // a server that came back older may have lost groups
  const rosters = await Promise.all(who.stream.partitions.map((one) => loadRoster(reading.member.server, one)));
  const groups = new Set(rosters.flatMap((roster) => [...roster.groups.keys()]));
  if (!create && !groups.has(who.group)) throw unknownGroup(who.stream.name, who.group, [...groups].sort());
  await reading.member.learnRuns(); // a server that is replaced from now on may lack the member
  await reading.join();
  if (groups.size > 0 && !groups.has(who.group)) {
    notify(newGroupNotice(who.group, [...groups].sort(), reading.member.first));
  }
  return reading;
}
