// Heartbeats: the loops that show that a member lives. In a shared group they also renew leases, claim the entries of
// dead members, and find suspects.

import { setTimeout as sleep } from "node:timers/promises";
import { MemberReplaced, ServerUnavailable } from "../errors.js";
import type { Server } from "../server/client.js";
import { type PartitionKeys, RELEASED } from "../stream/keys.js";
import {
  claimEntry,
  compareIds,
  type EntriesKey,
  lastGivenTo,
  listHeld,
  listOverdue,
  type PendingEntry,
} from "../stream/pending.js";
import { endedMembers, isReturned } from "../stream/presence.js";
import {
  beat,
  countLive,
  type IdleLoop,
  leaveGroup,
  type MemberRecord,
  type Membership,
  type Snapshot,
  snapshotOf,
} from "../stream/roster.js";
import { type Notify, now, Outage } from "../waiting.js";
import { BackgroundQuery } from "./backgroundQuery.js";
import type { LoaderBatch } from "./batch.js";
import { Lease, type LeaseSighting, type Leases, planReclaim } from "./leases.js";
import { unlessAway } from "./sentences.js";

/** Renewals are cheap, and their rhythm decides how soon others see that a member lives. */
const BEATS_PER_LEASE = 30;
const LONGEST_BEAT_MS = 2000;
const LOOKS_PER_LEASE = 12;
/** The longest pause between two looks. A member whose process has ended on this host is to be known within 5 s. */
const LONGEST_LOOK_MS = 2000;
/** An entry whose holder lives is renewed with every heartbeat, and is not even listed. */
const OVERDUE_BEATS = 2;
const MANY_DELIVERIES = 5;
/** A server or process that stood still for longer than a third of a lease counts as an outage. */
const OUTAGES_PER_LEASE = 3;

/** Return whether another loader of this process has joined as this member since. */
function isOlder(older: Membership, newer: Membership): boolean {
  const isSame = older.stream.id === newer.stream.id && older.group === newer.group && older.member === newer.member;
  return isSame && older.incarnation !== newer.incarnation;
}

function replacedHere({ group, member, order }: Membership): MemberReplaced {
  const [named, advice] = order
    ? [`'${member}'`, "a rank is one loader, so close the older one first"]
    : [`member '${member}'`, "to share the group's batches, give each loader a `member` of its own"];
  return new MemberReplaced(
    `another loader of this process joined group '${group}' as ${named}: this one stops; ${advice}`,
  );
}

/** The heartbeats of this process. */
const RUNNING = new Set<Heartbeat>();

/** Shows on one server that a member lives, from `start` to `stop`. */
export class Heartbeat {
  protected readonly server: Server;
  protected readonly who: Membership;
  protected readonly leaseMs: number;
  #partitions: readonly PartitionKeys[];
  /** The reason why it ended, for example because another process took the name. */
  error: Error | null = null;
  #idle: { readonly since: number; readonly handedBytes: number } | null = null;
  /** The epoch that is being read here. What others left of later epochs is not claimed yet. */
  protected horizon = -1;
  #add: (other: Heartbeat) => void = () => {};
  readonly #stop = new AbortController();
  readonly #outage = new Outage(() => {}, "renewing"); // others report the outage
  #running: Promise<void> = Promise.resolve();

  /**
   * @param server Raises ServerUnavailable at once: this loop waits through failures itself.
   * @param partitions The partitions of one server.
   */
  constructor(server: Server, who: Membership, leaseMs: number, partitions: readonly PartitionKeys[]) {
    this.server = server;
    this.who = who;
    this.leaseMs = leaseMs;
    this.#partitions = partitions;
  }

  /** The partitions. Those that move to another server are left to another heartbeat. */
  get partitions(): readonly PartitionKeys[] {
    return this.#partitions;
  }

  /** Give each heartbeat that takes over partitions to `add`, which starts it. */
  onSplit(add: (other: Heartbeat) => void): void {
    this.#add = add;
  }

  /** Leave partitions that moved to other servers to other heartbeats. A server that is silent delays its own only. */
  async #split(): Promise<void> {
    const [, ...others] = await this.server.byServerNow(this.#partitions.map(({ roster }) => roster));
    const moved = others.map((some) => some.map((at) => this.#partitions[at] as PartitionKeys));
    this.#partitions = this.#partitions.filter((one) => !moved.flat().includes(one));
    for (const some of moved) {
      const other = this.splitOff(some);
      other.readEpoch(this.horizon);
      other.#idle = this.#idle;
      this.#add(other);
    }
  }

  /** Return a heartbeat of the same kind, for some of the partitions. */
  protected splitOff(partitions: readonly PartitionKeys[]): Heartbeat {
    return new Heartbeat(this.server, this.who, this.leaseMs, partitions);
  }

  /** Learn which epoch is being read here. */
  readEpoch(epoch: number): void {
    this.horizon = epoch;
  }

  /** Tell everyone with the next heartbeat that the loop has waited for so long, or, with null, that it goes on. */
  tellIdle(idle: IdleLoop | null): void {
    this.#idle = idle === null ? null : { since: now() - idle.idleMs, handedBytes: idle.handedBytes };
  }

  protected get said(): IdleLoop | null {
    return this.#idle === null ? null : { idleMs: now() - this.#idle.since, handedBytes: this.#idle.handedBytes };
  }

  /** Start it. An older member of this process and name ends at once, and not with its next heartbeat. */
  start(): void {
    for (const other of RUNNING) if (isOlder(other.who, this.who)) other.error ??= replacedHere(this.who);
    RUNNING.add(this);
    this.#running = this.#run();
  }

  /** End it. Returns once nothing of it is under way. */
  async stop(): Promise<void> {
    RUNNING.delete(this);
    this.#stop.abort();
    await this.#running;
  }

  /** Raise the error that ended the heartbeat. */
  raiseError(): void {
    if (this.error !== null) throw this.error;
  }

  async #run(): Promise<void> {
    const { signal } = this.#stop;
    while (!signal.aborted) {
      try {
        const pauseMs = Math.min(this.leaseMs / BEATS_PER_LEASE, LONGEST_BEAT_MS);
        await sleep(pauseMs, undefined, { signal, ref: false }).catch(() => {});
        if (signal.aborted) return;
        await this.#split();
        await this.beat();
        this.#outage.over();
        await this.afterBeat();
      } catch (error) {
        this.missed();
        if (signal.aborted) return;
        if (!(await this.#isBorne(error as Error))) return;
      }
    }
  }

  async #isBorne(error: Error): Promise<boolean> {
    try {
      if (!(error instanceof ServerUnavailable)) throw error;
      await this.#outage.bear(error);
      return true;
    } catch (final) {
      this.error = final as Error; // a loop that continued would train on what others take over
      return false;
    }
  }

  protected async beat(): Promise<void> {
    await this.beatEach(async (partition) => {
      await beat(this.server, this.who, partition, new Map(), this.said);
    });
  }

  /** Give a heartbeat in every partition. */
  protected async beatEach(give: (partition: PartitionKeys) => Promise<void>): Promise<void> {
    const settled = await Promise.allSettled(this.partitions.map(give));
    const failures = settled.flatMap((one) => (one.status === "rejected" ? [one.reason as Error] : []));
    const final = failures.find((error) => !(error instanceof ServerUnavailable)) ?? failures[0];
    if (final !== undefined) throw final;
  }

  /** Do what else is due after a heartbeat. A rank has nothing to do. */
  protected async afterBeat(): Promise<void> {}

  /** Handle a heartbeat that did not reach the server. */
  protected missed(): void {}
}

/** An entry that this member took over, to be fetched by id. A part of it may be acknowledged already. */
export interface ClaimedEntry {
  readonly entry: PendingEntry;
  /** Whether training may die on it. Then it is delivered alone, after everything else. */
  readonly isSuspect: boolean;
}

/** A heartbeat that also renews leases, and claims entries that the reader fetches from `claims`. */
export class LeaseRenewer extends Heartbeat {
  readonly #leases: Leases;
  readonly #notify: Notify;
  #seen: ReadonlyMap<string, LeaseSighting> = new Map();
  claims: ClaimedEntry[] = [];
  /** The members of the group that lived at the last look. */
  members = 1;
  #began = now();
  #renewed = now();
  /** When the last late answer was received. Its entries are not known to be held before the next renewal. */
  #late = Number.NEGATIVE_INFINITY;
  #looked = now();
  #turn: Promise<unknown> = Promise.resolve();
  readonly #looks: BackgroundQuery<void>;

  constructor(
    server: Server,
    who: Membership,
    leases: Leases,
    leaseMs: number,
    notify: Notify,
    partitions: readonly PartitionKeys[],
  ) {
    super(server, who, leaseMs, partitions);
    this.#leases = leases;
    this.#notify = notify;
    // the states of the epochs are in the first partition
    this.#looks = new BackgroundQuery(partitions[0] === who.stream.partitions[0] ? null : 0);
  }

  /** See `Heartbeat`. What was claimed in these partitions goes along. */
  protected override splitOff(partitions: readonly PartitionKeys[]): LeaseRenewer {
    const { server, who, leaseMs } = this;
    const other = new LeaseRenewer(server, who, this.#leases, leaseMs, this.#notify, partitions);
    other.members = this.members;
    other.#renewed = this.isFresh ? this.#renewed : Number.NEGATIVE_INFINITY;
    other.claims = this.claims.filter(({ entry }) => partitions.includes(entry.partition));
    this.claims = this.claims.filter(({ entry }) => !partitions.includes(entry.partition));
    return other;
  }

  /**
   * Return whether the leases were renewed in time. If not, they may be another member's by now.
   *
   * An entry is received up to a third of a lease after it was given out, without a renewal. The rest of the lease is the
   * limit here.
   */
  get isFresh(): boolean {
    const limitMs = this.leaseMs - this.leaseMs / OUTAGES_PER_LEASE;
    return this.#renewed > this.#late && now() - this.#renewed < limitMs;
  }

  /**
   * Note that leases were added, and when their entries were asked for. A process that stood still finds an answer of long
   * ago, and a renewal that is under way may not include it.
   */
  received(asked: number): void {
    if (now() - asked > this.leaseMs / OUTAGES_PER_LEASE) this.#late = now();
  }

  /** Return whether a claim is due for the reader of an epoch. */
  hasClaims(epoch: number, isSuspect = false): boolean {
    return this.claims.some((one) => one.entry.epoch <= epoch && one.isSuspect === isSuspect);
  }

  /**
   * Claim what is pending under this member's name and not held here, because a process before it was given it, or an
   * answer was lost.
   *
   * @param isAllAcknowledged Returns whether the server has answered every acknowledgement. Then an acknowledged entry
   *   that is pending is so because the server lost the end of its append-only file.
   */
  recover(isAllAcknowledged: () => boolean = () => false): Promise<void> {
    return this.#alone(async () => {
      const before = new Map(this.partitions.map(({ number }) => [number, this.#leases.ids(number)]));
      const areLost = isAllAcknowledged(); // asked after that: what is acknowledged from now on was held before
      const keys = this.#openKeys(await this.#snapshot());
      const mine = await listHeld(this.server, keys, this.who.group, this.who.member);
      const lost = mine.filter(({ partition: { number }, epoch, entryId }) => {
        if (this.#leases.holds(number, epoch, entryId)) return false;
        if (!this.#leases.isAcknowledging(number, epoch, entryId)) return true;
        return areLost && !before.get(number)?.get(epoch)?.includes(entryId);
      });
      await this.#claim(lost, 0);
    });
  }

  /** Note that a suspect, which is held here, is delivered now. */
  async countTurn({ entry }: ClaimedEntry): Promise<void> {
    await claimEntry(this.server, { ...entry, member: this.who.member }, this.who, 0, entry.deliveries + 1);
  }

  /** Look once at what is overdue in the group, and claim what may be claimed. */
  look(): Promise<void> {
    return this.#alone(async () => {
      const began = now();
      const snapshot = await this.#snapshot();
      await this.#signOffEnded(snapshot);
      const keys = this.#openKeys(snapshot).filter(({ epoch }) => epoch <= this.horizon);
      const overdueMs = Math.floor((this.leaseMs * OVERDUE_BEATS) / BEATS_PER_LEASE);
      const listed = await listOverdue(this.server, keys, this.who.group, overdueMs);
      const others = listed.filter((one) => !this.#leases.holds(one.partition.number, one.epoch, one.entryId));
      this.#forgetAfterStall(began);
      const { seen, claims } = planReclaim(this.#seen, others, this.who.member, now(), this.leaseMs);
      this.#seen = seen;
      const returned = claims.filter(({ member }) => isReturned(member));
      await this.#claim(returned, 0);
      await this.#claim(
        claims.filter((one) => !returned.includes(one)),
        Math.floor(this.leaseMs * 0.9),
      );
    });
  }

  protected override async beat(): Promise<void> {
    const began = now();
    this.#forgetAfterStall(this.#began);
    this.#began = began;
    await this.beatEach((partition) => this.#renew(partition));
    this.#renewed = began; // the time of the question, not of the answer
  }

  protected override async afterBeat(): Promise<void> {
    this.#forgetAfterStall(this.#began);
    if (this.#began - this.#looked < Math.min(this.leaseMs / LOOKS_PER_LEASE, LONGEST_LOOK_MS)) return;
    this.#looked = this.#began;
    await this.#looks.ask(() => this.look());
  }

  override async stop(): Promise<void> {
    await super.stop();
    await this.#looks.settled();
  }

  protected override missed(): void {
    this.#seen = new Map(); // a stopped server ages every lease at once
  }

  #forgetAfterStall(since: number): void {
    if (now() - since > this.leaseMs / OUTAGES_PER_LEASE) this.missed();
  }

  async #renew(partition: PartitionKeys): Promise<void> {
    const held = this.#leases.toRenew(partition.number);
    for (const [epoch, ids] of await beat(this.server, this.who, partition, held, this.said)) {
      const count = this.#leases.lose(partition.number, epoch, ids);
      if (count > 0) {
        const why = await this.#whyLost({ partition, epoch }, ids);
        this.#notify(`member '${this.who.member}' lost ${count} entries of epoch ${epoch}: ${why}`);
      }
    }
  }

  async #whyLost(entries: EntriesKey, ids: readonly string[]): Promise<string> {
    const given = await unlessAway(lastGivenTo(this.server, entries, this.who.group), undefined);
    if (given !== undefined && ids.some((id) => compareIds(id, given) > 0)) {
      return "their server came back as it was before it gave them out, and gives them out again";
    }
    return `not renewed within ${this.leaseMs / 1000} s, or dropped; another member hands them out`;
  }

  async #snapshot(): Promise<Snapshot> {
    const { stream, group } = this.who;
    const snapshot = await snapshotOf(this.server, stream, this.partitions[0] as PartitionKeys);
    this.members = countLive(snapshot.roster, group);
    return snapshot;
  }

  /** Return where entries of the group's open epochs may be pending. An abandoned one takes no acknowledgements. */
  #openKeys({ roster, states }: Snapshot): EntriesKey[] {
    const { group } = this.who;
    const record = roster.groups.get(group);
    const epochs = roster.epochs.filter(
      (epoch) =>
        record !== undefined &&
        epoch >= record.first &&
        !roster.closed.has(`${group}:${epoch}`) &&
        states.get(epoch) !== "abandoned",
    );
    return this.partitions.flatMap((partition) => epochs.map((epoch) => ({ partition, epoch })));
  }

  /** Sign off members whose processes have ended on this host, so that their entries may be claimed. */
  async #signOffEnded({ roster, nowMs }: Snapshot): Promise<void> {
    const keys = this.partitions.flatMap((partition) => roster.epochs.map((epoch) => ({ partition, epoch })));
    for (const ended of endedMembers(roster.members, this.who.group, nowMs)) await this.#signOff(ended, keys);
  }

  async #signOff({ member, incarnation }: MemberRecord, keys: readonly EntriesKey[]): Promise<void> {
    const listed = await listHeld(this.server, keys, this.who.group, member);
    let wasThere = false;
    // the first partition comes last, so that another look finds the member again until then
    for (const partition of [...this.partitions].reverse()) {
      const held = new Map<number, string[]>();
      for (const one of listed.filter((entry) => entry.partition === partition)) {
        held.set(one.epoch, [...(held.get(one.epoch) ?? []), one.entryId]);
      }
      wasThere = await leaveGroup(this.server, { ...this.who, member, incarnation }, partition, held);
    }
    if (wasThere) {
      this.#notify(`member '${member}' has ended on this host: its ${listed.length} entries are handed out again`);
    }
  }

  async #claim(entries: readonly PendingEntry[], minIdleMs: number): Promise<void> {
    for (const entry of entries) {
      // What a member returned as it left killed none. A suspect's turn counts when it comes, so that those that are
      // only suspected along with it come before it.
      const isSuspect = entry.deliveries >= MANY_DELIVERIES;
      const deliveries = entry.deliveries + (isSuspect || entry.member === RELEASED ? 0 : 1);
      const asked = now();
      if (!(await claimEntry(this.server, entry, this.who, minIdleMs, deliveries))) continue;
      // held from now on, so that it is renewed, until the reader's lease replaces it
      this.#leases.add(new Lease(entry.partition.number, entry.epoch, -1, entry.entryId, 0));
      this.received(asked);
      this.claims.push({ entry, isSuspect });
    }
  }

  /** Run one look at a time. */
  #alone<T>(act: () => Promise<T>): Promise<T> {
    const turn = this.#turn.then(act, act);
    this.#turn = turn.catch(() => {});
    return turn;
  }
}

/** The heartbeats of one member, one for each server, so that a silent server delays no other server's. */
export class Heartbeats<One extends Heartbeat = Heartbeat> {
  readonly #each: One[];
  readonly #added: (from: Heartbeat, other: Heartbeat) => void;
  #isStopped = false;

  /**
   * @param each In the order of partitions.
   * @param added Takes note of a heartbeat that takes over partitions from another one.
   */
  constructor(each: readonly One[], added: (from: One, other: One) => void = () => {}) {
    this.#each = [...each];
    this.#added = added as (from: Heartbeat, other: Heartbeat) => void;
    for (const one of each) one.onSplit((other) => this.#add(one, other as One));
  }

  /** The heartbeats of now. */
  get each(): readonly One[] {
    return this.#each;
  }

  /** Start a heartbeat that takes over partitions from another one. */
  #add(from: One, other: One): void {
    if (this.#isStopped) return;
    other.onSplit((another) => this.#add(other, another as One));
    this.#each.push(other);
    this.#added(from, other);
    other.start();
  }

  /** See `Heartbeat.readEpoch`. */
  readEpoch(epoch: number): void {
    for (const one of this.each) one.readEpoch(epoch);
  }

  /** See `Heartbeat.tellIdle`. */
  tellIdle(idle: IdleLoop | null): void {
    for (const one of this.each) one.tellIdle(idle);
  }

  start(): void {
    for (const one of this.each) one.start();
  }

  /** End them. Returns once nothing of them is under way. */
  async stop(): Promise<void> {
    this.#isStopped = true;
    await Promise.all(this.each.map((one) => one.stop()));
  }

  /** Raise the error that ended one of them. */
  raiseError(): void {
    for (const one of this.each) one.raiseError();
  }
}

/** The heartbeats of a member of a shared group. */
export class LeaseRenewers extends Heartbeats<LeaseRenewer> {
  /** Return what was claimed on all servers. */
  get claims(): ClaimedEntry[] {
    return this.each.flatMap(({ claims }) => claims);
  }

  /** Learn how many members of the group live. */
  expectMembers(members: number): void {
    for (const one of this.each) one.members = members;
  }

  /** See `LeaseRenewer.recover`. */
  async recover(isAllAcknowledged?: () => boolean): Promise<void> {
    await Promise.all(this.each.map((one) => one.recover(isAllAcknowledged)));
  }

  /** See `LeaseRenewer.look`. */
  async look(): Promise<void> {
    await Promise.all(this.each.map((one) => one.look()));
  }

  /** Return whether the leases of a batch were renewed in time. If not, they may be another member's by now. */
  isFreshFor(batch: LoaderBatch): boolean {
    const late = this.each.filter(({ isFresh }) => !isFresh).flatMap(({ partitions }) => partitions);
    if (late.length === 0) return true;
    const numbers = new Set(late.map(({ number }) => number));
    return !batch.leased.some(({ lease }) => numbers.has(lease.partition));
  }
}
