// A member of a group at work: it joins or resets the group, finds the next epoch, acknowledges, closes epochs, and
// leaves. `rankMember.ts` has what differs for a rank.

import { EpochIncomplete, EpochNotFound, GroupBusy, GroupFinished } from "../errors.js";
import type { Server } from "../server/client.js";
import { Confirmer } from "../stream/confirmed.js";
import type { PartitionKeys } from "../stream/keys.js";
import { acknowledgement, type ShardRange, uncovered } from "../stream/ledger.js";
import { isLeftOver } from "../stream/leftoverEpochs.js";
import { begunShards, findManifest, isEnded, type Manifest, retainedEpochs } from "../stream/manifest.js";
import { hasUnread, pendingMembers } from "../stream/pending.js";
import { GONE_AFTER, mayBeAtWork } from "../stream/presence.js";
import { isIn } from "../stream/ranges.js";
import {
  closeForGroup,
  countLive,
  joinGroup,
  leaveGroup,
  loadRoster,
  type Membership,
  type Roster,
  serverMs,
  snapshotOf,
} from "../stream/roster.js";
import { partitionOf, readCounters, type Stream } from "../stream/stream.js";
import type { Notify, Outage } from "../waiting.js";
import type { LoaderBatch } from "./batch.js";
import { Leases, planAcknowledgement } from "./leases.js";
import { Outboxes, type RunScript } from "./outbox.js";
import { whyNoEpoch } from "./sentences.js";

/** The longest wait for a replica that has not got the end of an epoch. */
const CLOSE_MS = 2000;
/** The looks that must find samples missing. A server that is replaced between two gives entries out again. */
const CLOSE_LOOKS = 3;

/** Where a group begins: at its own position, again at the first whole epoch, or again at an epoch. */
export type Start = "resume" | "remaining" | "earliest" | number;

/** A member of a group: it joins, finds epochs, acknowledges, closes epochs and leaves. */
export class Member {
  /** The server, whose commands are repeated while it is away. */
  readonly server: Server;
  /** The same, whose commands fail then. */
  readonly impatient: Server;
  readonly who: Membership;
  readonly leases = new Leases();
  /** The first epoch that the group reads. */
  first = 0;
  /** The members of the group that lived when an epoch was last looked for. */
  members = 1;
  /** The epochs iterated here that were not acknowledged as a whole yet, because others held a part. */
  readonly unclosed = new Set<number>();
  /** The partitions of each server, as they lay when this member was made. */
  readonly servers: readonly (readonly PartitionKeys[])[];
  protected readonly outboxes: Outboxes;
  readonly #confirmer: Confirmer;
  readonly #outage: Outage;
  readonly #manifests = new Map<number, Manifest>();
  #halfOpen: number | null = null;

  /**
   * @param server The server, whose commands fail while it is away.
   * @param outage How long it is waited for.
   * @param isClosed Whether nobody waits for this member any more.
   */
  constructor(server: Server, who: Membership, outage: Outage, notify: Notify, isClosed: () => boolean) {
    this.server = server.patient(outage);
    this.impatient = server;
    this.who = who;
    this.#outage = outage;
    this.#confirmer = new Confirmer(server, who.stream, notify, { isClosed });
    const { partitions } = who.stream;
    const numbers = server.byServer(partitions.map(({ roster }) => roster));
    this.servers = numbers.map((some) => some.map((number) => partitions[number] as PartitionKeys));
    this.outboxes = new Outboxes((...call) => this.runAcknowledgement(...call), server, who.stream, this.servers);
  }

  /** Run a script that acknowledges. */
  protected runAcknowledgement(...[script, keys, args]: Parameters<RunScript>): Promise<unknown> {
    return this.server.run(script, keys, args);
  }

  /** Do something again while the server is away. */
  patiently<T>(act: () => Promise<T>): Promise<T> {
    return this.#outage.through(act);
  }

  get stream(): Stream {
    return this.who.stream;
  }

  /** Return the partition that hears of everything first. */
  get begin(): PartitionKeys {
    return this.stream.partitions[0] as PartitionKeys;
  }

  /**
   * Put group and member on the roster. 'earliest' or an epoch makes the group read again from there. 'resume' and
   * 'remaining' continue where the group stands, 'remaining' without epochs that the group lost.
   */
  async join(start: Start): Promise<void> {
    if (start !== "resume" && start !== "remaining") await this.#restart(start);
    this.first = await this.enter({ first: await this.floorOf(start), force: start !== "resume" });
  }

  /** Write the roster's fields, and return the first epoch. */
  protected async enter(options: { first: number; force: boolean }): Promise<number> {
    return await this.onReplicas(() => joinGroup(this.server, this.who, options));
  }

  /** Write on every roster, as often as a failover loses it, and return once replicas have it. */
  protected async onReplicas<T>(write: () => Promise<T>, limitMs?: number): Promise<T> {
    return await this.#confirmer.run(
      this.stream.partitions.map(({ roster }) => roster),
      write,
      limitMs,
    );
  }

  /** Note that the group is done with an epoch. Training goes on also while a replica is missing. */
  protected async closeForGroup(epoch: number): Promise<void> {
    await this.onReplicas(() => closeForGroup(this.server, this.stream, this.who.group, epoch), CLOSE_MS);
  }

  protected async floorOf(start: Start): Promise<number> {
    return typeof start === "number" ? start : (await readCounters(this.server, this.stream)).floor;
  }

  async #restart(start: "earliest" | number): Promise<void> {
    const { group, member, order, stream } = this.who;
    const roster = await loadRoster(this.server, this.begin);
    const { next } = await readCounters(this.server, stream);
    if (typeof start === "number" && !roster.epochs.includes(start) && start < next) {
      const there = roster.epochs.join(", ") || "none";
      throw new EpochNotFound(`epoch ${start} of '${stream.name}' is not retained; retained: ${there}`);
    }
    // nothing to reset, or not this member's to reset: joining says that
    if (roster.groups.get(group)?.kind !== (order === null ? "shared" : "ordered")) return;
    const nowMs = await serverMs(this.server, this.begin);
    const others = roster.members.filter((one) => one.group === group && one.member !== member);
    const live = others.filter((one) => mayBeAtWork(one, nowMs)).map((one) => one.member);
    if (live.length > 0) {
      throw new GroupBusy(
        `group '${group}' is read by ${live.join(", ")}: start: ${JSON.stringify(start)} would reset it under them; ` +
          `stop them first, or use another group; ${GONE_AFTER}`,
      );
    }
    await resetGroup(this.server, stream, group, typeof start === "number" ? start : await this.firstWhole(roster));
  }

  /** Return the first epoch after all those that retention took entries of, in any partition. */
  protected async firstWhole(roster: Roster): Promise<number> {
    const rosters = await Promise.all(this.stream.partitions.map((partition) => loadRoster(this.server, partition)));
    const trimmed = Math.max(-1, ...rosters.flatMap((one) => [...one.trimmed]));
    return roster.epochs.find((epoch) => epoch > trimmed) ?? trimmed + 1;
  }

  /**
   * Return the group's lowest epoch above `after` that it has not acknowledged, or null if there is none yet.
   *
   * @throws GroupFinished once every planned epoch was read.
   */
  async nextEpoch(after: number): Promise<number | null> {
    const { stream, group } = this.who;
    const last = stream.partitions.at(-1) as PartitionKeys; // this partition hears of a new epoch last
    const { first: known, roster, states } = await snapshotOf(this.server, stream, last);
    this.members = countLive(known, group);
    this.#halfOpen = null;
    for (const [epoch, state] of states) {
      if (epoch < this.first || epoch <= after || known.closed.has(`${group}:${epoch}`)) continue;
      if (roster.epochs.includes(epoch)) return epoch;
      if (state !== "abandoned" && !roster.retiring.has(epoch)) {
        if (!known.epochs.includes(epoch) && (await isLeftOver(this.server, stream, epoch))) {
          this.unclosed.add(epoch); // should its producer go on after all
          continue;
        }
        this.#halfOpen = epoch;
        return null; // read now, it would look like one that was released
      }
    }
    const { next, final } = await readCounters(this.server, stream);
    const closed = [...known.closed].filter((name) => name.slice(0, name.lastIndexOf(":")) === group);
    const numbers = closed.map((name) => Number(name.slice(name.lastIndexOf(":") + 1)));
    const read = Math.max(after, this.first - 1, known.groups.get(group)?.read ?? -1, ...numbers);
    if (final !== null && next >= final && read + 1 >= final) throw new GroupFinished(await this.finished(after));
    return null;
  }

  /**
   * Return whether an epoch was released. That a roster lacks it proves nothing, because its server may have lost it. A
   * release is noted on the rosters before anything is removed, and in meta before the manifest is.
   */
  async isReleased(epoch: number): Promise<boolean> {
    const rosters = await Promise.all(this.stream.partitions.map((one) => loadRoster(this.server, one)));
    if ((await findManifest(this.server, this.stream, epoch)) === null) {
      return isIn((await readCounters(this.server, this.stream)).released, epoch);
    }
    return rosters.some(
      ({ epochs, retiring, retired }) => !epochs.includes(epoch) && (retiring.has(epoch) || isIn(retired, epoch)),
    );
  }

  /** Return a notice on an epoch that was being read, if a server lost its manifest, else "". */
  async lossOf(epoch: number): Promise<string> {
    const isThere = (await findManifest(this.server, this.stream, epoch)) !== null;
    if (isThere || (await this.isReleased(epoch))) return "";
    const gone = new EpochNotFound(`epoch ${epoch} of '${this.stream.name}' is gone, and nobody released it`);
    const { message } = await this.who.runs.explained(gone, this.begin);
    return `${message}. It is read again once its producer opens it again`;
  }

  /** Return a sentence on a group for which there is no epoch to read now. */
  async finished(after: number): Promise<string> {
    const { stream, group } = this.who;
    const { next } = await readCounters(this.server, stream);
    const roster = await loadRoster(this.server, this.begin);
    const given: number[] = [];
    let isFeed = false;
    for (const epoch of roster.epochs.filter((one) => this.first <= one && one <= after)) {
      const manifest = await findManifest(this.server, stream, epoch);
      if (manifest === null || manifest.state === "abandoned") continue;
      given.push(epoch);
      isFeed = manifest.kind === "feed";
    }
    const where = { stream: stream.name, group, roster, first: this.first, begun: next };
    return whyNoEpoch({ ...where, given, halfOpen: this.#halfOpen, isFeed });
  }

  // --- acknowledging ---

  /** Learn what is known already of an epoch that is to be read. */
  learn(manifest: Manifest): void {
    this.#manifests.set(manifest.epoch, manifest);
  }

  /** Forget what is known of an epoch that a server lost, because it may come back with less. */
  forget(epoch: number): void {
    this.#manifests.delete(epoch);
  }

  /** Return a manifest. What does not change of it is asked for once. */
  protected async manifestOf(epoch: number): Promise<Manifest | null> {
    const known = this.#manifests.get(epoch) ?? (await findManifest(this.server, this.stream, epoch));
    if (known !== null) this.#manifests.set(epoch, known);
    return known;
  }

  /** Send the acknowledgement of a batch that was trained on. Returns what the server has yet to answer. */
  async acknowledge(batch: LoaderBatch): Promise<Promise<void>[]> {
    const numbers = new Set(batch.leased.map(({ lease }) => lease.partition));
    await this.outboxes.hasRoom([...numbers].map((number) => this.stream.partitions[number] as PartitionKeys));
    const manifest = await this.manifestOf(batch.epoch);
    const sent: Promise<void>[] = [];
    for (const [number, { ids, ranges }] of planAcknowledgement(batch)) {
      const partition = this.stream.partitions[number] as PartitionKeys;
      if (manifest === null) {
        this.leases.remove(number, batch.epoch, ids);
        continue;
      }
      const call = acknowledgement(partition, manifest, this.who.group, ids, ranges);
      const answer = this.outboxes.send(partition, "acknowledge", ...call);
      sent.push(answer);
      this.leases.remove(number, batch.epoch, ids, answer);
    }
    return sent;
  }

  /** Return whether this member still holds something of an epoch. */
  hasUnacknowledged(epoch: number): boolean {
    return this.leases.holdsEpoch(epoch);
  }

  /** Return whether every acknowledgement sent was answered. */
  get isAllAcknowledged(): boolean {
    return this.outboxes.isEmpty;
  }

  /** Give partitions that moved to another server an outbox of their own. */
  split(partitions: readonly PartitionKeys[]): void {
    this.outboxes.split(partitions);
  }

  /** Return once every acknowledgement is on the server. */
  async flush(): Promise<void> {
    await this.outboxes.flush();
  }

  /** Flush, and wait for a limited time until a replica has everything. */
  async confirm(): Promise<void> {
    await this.outboxes.confirm();
  }

  /** Return once the servers of these partitions have again what this member acknowledged and older ones lost. */
  async attend(partitions: readonly PartitionKeys[]): Promise<void> {
    await this.outboxes.attend(partitions);
  }

  /** Remember the run of each server, before the join. */
  async learnRuns(): Promise<void> {
    await this.patiently(() => Promise.all([this.who.runs.learn(), this.outboxes.learn()]));
  }

  /** Look no more after what was acknowledged. */
  stop(): void {
    this.outboxes.close();
  }

  // --- the end of epochs ---

  /** Close for the group the epochs that its ledger covers. Raises EpochIncomplete for samples that will never come. */
  async closeEpochs(ended: number): Promise<void> {
    await this.confirm();
    this.unclosed.add(ended);
    for (const epoch of [...this.unclosed].sort((a, b) => a - b)) {
      if (!(await this.close(epoch))) continue;
      this.unclosed.delete(epoch);
      this.#manifests.delete(epoch);
    }
  }

  protected async close(epoch: number): Promise<boolean> {
    const { stream, group } = this.who;
    const manifest = await findManifest(this.server, stream, epoch);
    if (manifest === null || manifest.state === "abandoned") return true;
    if (!isEnded(manifest)) return false;
    const keys = stream.partitions.map((partition) => ({ partition, epoch }));
    let missing: ShardRange[] = [];
    for (let look = 0; look < CLOSE_LOOKS; look += 1) {
      missing = await uncovered(this.server, stream, manifest, group);
      if (missing.length === 0) {
        await this.closeForGroup(epoch);
        return true;
      }
      // another member closed it meanwhile: the missing ledgers had gone already
      if (!(await loadRoster(this.server, this.begin)).epochs.includes(epoch)) return true;
      // in the order in which an entry goes, so that no member takes one behind these looks
      if (await this.hasUnread(epoch)) return false;
      if ((await pendingMembers(this.server, keys, group)).size > 0) return false;
    }
    const samples = missing.reduce((sum, { lo, hi }) => sum + hi - lo, 0);
    const ranges = missing.slice(0, 5).map(({ shard, lo, hi }) => `shard ${shard} offsets ${lo}-${hi - 1}`);
    throw new EpochIncomplete(
      `epoch ${epoch} of '${stream.name}' is produced, but group '${group}' was never given ${samples} samples ` +
        `(${ranges.join(", ")}): \`penstock audit ${stream.name} --repair SOURCE...\` makes them again, ` +
        `\`penstock bad drop ${stream.name} ${epoch} --group ${group}\` goes on without`,
    );
  }

  /** Return whether an epoch has entries that no member was given. In an epoch that was read, those are repairs. */
  async hasUnread(epoch: number): Promise<boolean> {
    const { stream, group } = this.who;
    for (const partition of stream.partitions) {
      if (await hasUnread(this.server, { partition, epoch }, group)) return true;
    }
    return false;
  }

  /** Hand back what is held, and leave. */
  async leave(): Promise<void> {
    for (const partition of this.stream.partitions) {
      await leaveGroup(this.server, this.who, partition, this.leases.ids(partition.number));
    }
  }
}

/** Make the group read again from epoch `first`. Its acknowledgements go first. */
async function resetGroup(server: Server, stream: Stream, group: string, first: number): Promise<void> {
  for (const epoch of (await retainedEpochs(server, stream)).keys()) {
    if (epoch < first) continue;
    const manifest = await findManifest(server, stream, epoch);
    const shards = manifest === null ? 0 : await begunShards(server, stream, manifest);
    const keys = stream.partitions.flatMap((one) => [one.dead(epoch, group), one.positions(epoch, group)]);
    for (let shard = 0; shard < shards; shard += 1) keys.push(partitionOf(stream, shard).ledger(epoch, group, shard));
    for (const key of keys) await server.call("UNLINK", key);
  }
  for (const partition of stream.partitions) {
    const { epochs } = await loadRoster(server, partition);
    const keys = [partition.roster, ...epochs.map((epoch) => partition.entries(epoch))];
    await server.run("reset_group", keys, [group, first, ...epochs]);
  }
}
