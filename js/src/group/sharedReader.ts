// The readers of one epoch of a shared group: they ask for entries, fill batches, fetch claimed entries, and decide
// when the epoch is over.

import { setTimeout as sleep } from "node:timers/promises";
import {
  DamagedKey,
  EpochIncomplete,
  EpochNotFound,
  SegmentsUnseen,
  ServerUnavailable,
  UnsupportedVersion,
} from "../errors.js";
import { bytesOf, entriesOf, type StreamEntry, textOf } from "../server/client.js";
import type { BlockingConnection } from "../stream/blockingConnection.js";
import type { PartitionKeys } from "../stream/keys.js";
import { acknowledgement } from "../stream/ledger.js";
import { findManifest, isEnded, liveState, type Manifest, renewed, shardCount, shardSize } from "../stream/manifest.js";
import { isGone, pendingMembers, wasGivenSince } from "../stream/pending.js";
import { loadRoster, rejoin, serverMs } from "../stream/roster.js";
import { partitionOf, requireThere } from "../stream/stream.js";
import { type Notify, now, OUTAGE_MS, Outage, seconds } from "../waiting.js";
import { BackgroundQuery, ELSEWHERE_MS, within } from "./backgroundQuery.js";
import { Assembler } from "./batch.js";
import { CommitCheck } from "./commitCheck.js";
import { crashNotice, DeadLetters, type EpochKnowledge, isDone, notReadHere } from "./deadLetters.js";
import type { DeliveryCheck } from "./deliveryCheck.js";
import { FetchPlanner, type FetchRequest } from "./fetchPlan.js";
import type { ClaimedEntry, LeaseRenewer } from "./heartbeat.js";
import { Lease } from "./leases.js";
import type { Member } from "./member.js";
import { type PrefetchQueue, QueueStopped, type ReaderQueue } from "./queue.js";
import { type GoodEntry, type Received, type ReceiveOptions, receiveShared } from "./receive.js";
import { unlessAway, whetherProducerRuns, whyNoRoom } from "./sentences.js";

/** How often, and at which distance, an epoch's state is looked at again: abandoning it writes several keys. */
const STATE_LOOKS = 10;
const STATE_LOOK_MS = 100;
const HOLDERS_LOOK_MS = 50;
/** The time between two looks at a partition that has lost the epoch. */
const LOST_LOOK_MS = 500;
/** The longest wait for acknowledgements that a replaced server may have lost. */
const ACKNOWLEDGED_MS = 10_000;
/** The time that other members have for the same. They look and try again each second. */
const OTHERS_MS = 2500;
const ROOM_MS = 200;
/** The longest wait of an idle read on a connection that another reader uses, too. */
const SHARED_BLOCK_MS = 10;

/** What the readers of shared entries are made of. */
export interface SharedReaderParts {
  readonly member: Member;
  /** One for each server. */
  readonly renewers: readonly LeaseRenewer[];
  /** The same. */
  readonly deliveries: readonly DeliveryCheck[];
  readonly connection: BlockingConnection;
  readonly receive: ReceiveOptions;
  readonly batchSize: number;
  readonly notify: Notify;
}

/** Raised where the connection broke while answers were awaited. */
class BrokenConnection extends Error {
  readonly why: ServerUnavailable;

  constructor(why: ServerUnavailable) {
    super(why.message);
    this.why = why;
  }
}

interface Asked {
  readonly request: FetchRequest;
  /** When it was sent, in milliseconds of the monotonic clock. */
  readonly at: number;
  readonly answer: Promise<StreamEntry[]>;
}

/**
 * Reads one epoch of a shared group, and what is left of earlier ones, into a prefetch queue. Each server has a reading
 * loop of its own: one that is away or silent holds up its own partitions only.
 */
export class SharedReaders {
  readonly epoch: number;
  readonly #made: SharedReaderParts;
  readonly #manifest: Manifest;
  readonly #queue: PrefetchQueue;
  readonly #known: EpochKnowledge = { isReadable: false, isReleaseTold: false };
  readonly #readers: SharedReader[] = [];
  readonly #running: Promise<void>[] = [];

  constructor(made: SharedReaderParts, manifest: Manifest, queue: PrefetchQueue) {
    this.epoch = manifest.epoch;
    this.#made = made;
    this.#manifest = manifest;
    this.#queue = queue;
    for (const [at, renewer] of made.renewers.entries()) this.#reader(renewer, made.deliveries[at] as DeliveryCheck);
  }

  #reader(renewer: LeaseRenewer, deliveries: DeliveryCheck): SharedReader {
    const isAlone = this.#made.member.stream.partitions.length === 1;
    const end = isAlone ? this.#queue : this.#queue.newInput();
    const others = (place: string) => this.#readers.some((one) => one !== reader && one.readsAt(place));
    const reader = new SharedReader(this.#made, renewer, deliveries, this.#manifest, end, this.#known, others);
    this.#readers.push(reader);
    return reader;
  }

  /** Read the partitions of a heartbeat that took them over from another one, because they moved to another server. */
  add(renewer: LeaseRenewer, deliveries: DeliveryCheck): void {
    if (this.#readers.every(({ hasEnded }) => hasEnded)) return;
    this.#running.push(this.#reader(renewer, deliveries).run());
  }

  /** A notice, if a server lost the epoch as a whole, else "". */
  get loss(): string {
    return this.#readers.find(({ loss }) => loss !== "")?.loss ?? "";
  }

  /** Read to the end. Everything ends in the queue, errors too. */
  async run(): Promise<void> {
    this.#running.push(...this.#readers.map((reader) => reader.run()));
    while (this.#running.length > 0) await this.#running.shift(); // meanwhile others may be added
  }

  /** Return why there is no batch, in words for the training loop's user. */
  async whyWaiting(ms: number): Promise<string> {
    const reader = this.#readers.find(({ hasEnded }) => !hasEnded) ?? this.#readers[0];
    return await (reader as SharedReader).whyWaiting(ms);
  }

  /** Return false: members share an epoch, so it is unknown which one gets the last batch. */
  isLast(): boolean {
    return false;
  }
}

/** Reads the partitions of one server. */
class SharedReader {
  readonly epoch: number;
  /** Whether this reader brings no more batches. */
  hasEnded = false;
  /** A notice, if a server lost the epoch as a whole. */
  loss = "";
  readonly #made: SharedReaderParts;
  readonly #renewer: LeaseRenewer;
  readonly #deliveries: DeliveryCheck;
  readonly #queue: ReaderQueue;
  readonly #known: EpochKnowledge;
  readonly #others: (place: string) => boolean;
  readonly #news: BackgroundQuery<Manifest>;
  readonly #assembler: Assembler;
  readonly #deadLetters: DeadLetters;
  readonly #committed: CommitCheck;
  #partitions: readonly PartitionKeys[];
  #planner: FetchPlanner;
  readonly #outage: Outage;
  readonly #asked: Asked[] = [];
  /** The partitions whose server has lost the epoch, and when that was first seen. */
  readonly #lostSince = new Map<PartitionKeys, number>();
  #manifest: Manifest;
  /** The members whose entries are waited for, once nothing else is left. */
  #silent: string[] = [];

  constructor(
    made: SharedReaderParts,
    renewer: LeaseRenewer,
    deliveries: DeliveryCheck,
    manifest: Manifest,
    queue: ReaderQueue,
    known: EpochKnowledge,
    others: (place: string) => boolean,
  ) {
    const { member, receive, batchSize, notify } = made;
    this.#made = made;
    this.#renewer = renewer;
    this.#deliveries = deliveries;
    this.#known = known;
    this.#others = others;
    this.epoch = manifest.epoch;
    this.#manifest = manifest;
    this.#queue = queue;
    this.#assembler = new Assembler(receive.spec, this.epoch, batchSize);
    this.#deadLetters = new DeadLetters(member, notify, known);
    this.#committed = new CommitCheck(member.server, member.stream, renewer.members);
    this.#partitions = renewer.partitions;
    this.#deliveries.keep(this.#partitions);
    this.#planner = this.#planned();
    this.#outage = new Outage(notify, "reading");
    // the server of the first partition has the manifest
    this.#news = new BackgroundQuery(renewer.partitions[0] === member.begin ? null : ELSEWHERE_MS);
  }

  /** Read to the end. Everything ends in the queue, errors too. */
  async run(): Promise<void> {
    try {
      await this.#read();
      this.#queue.end();
    } catch (error) {
      await this.#drain();
      if (error instanceof QueueStopped) this.#queue.end();
      else if (error instanceof EpochNotFound) await this.#endReleased(error);
      else this.#queue.end(await this.#causeOf(error as Error));
    } finally {
      this.hasEnded = true;
    }
  }

  /** Return this error, or the one that took the whole stream along. */
  async #causeOf(error: Error): Promise<Error> {
    if (!(error instanceof SegmentsUnseen)) return error;
    const { server, stream } = this.#made.member;
    return await requireThere(server, stream).then(
      () => error,
      (worse) => worse,
    );
  }

  /** Return why there is no batch, in words for the training loop's user. */
  async whyWaiting(ms: number): Promise<string> {
    const { member } = this.#made;
    const { name } = member.stream;
    if (this.#silent.length > 0) {
      return (
        `what ${this.#silent.join(", ")} was given of epoch ${this.epoch} of '${name}' and did not acknowledge: it is ` +
        "handed out here once its lease has lapsed"
      );
    }
    const found = findManifest(member.impatient, member.stream, this.epoch);
    const manifest = (await unlessAway(found, null)) ?? this.#manifest;
    const { sizes, done } = manifest;
    const shards = sizes === null ? "" : ` (${done.size} of ${sizes.length} shards are done)`;
    const none = `epoch ${this.epoch} of '${name}'${shards}; none came for ${seconds(ms)} s`;
    const full = await whyNoRoom(member.impatient, member.stream);
    if (full !== "") return `more samples of ${none}: ${full}`;
    if (isEnded(manifest)) return `the rest of ${none}`;
    if (await unlessAway(this.#wasGivenSince(ms), false)) {
      return (
        `more samples of ${none}: members of group '${member.who.group}' were given what was committed in this time, ` +
        "and no batch is full here"
      );
    }
    return `more samples of ${none}. ${whetherProducerRuns(name, this.epoch, ms)}`;
  }

  /** Return whether the group was given an entry that was committed in the last `ms` milliseconds. */
  async #wasGivenSince(ms: number): Promise<boolean> {
    const { impatient, stream, who } = this.#made.member;
    for (const partition of stream.partitions) {
      if (await wasGivenSince(impatient, { partition, epoch: this.epoch }, who.group, ms)) return true;
    }
    return false;
  }

  /** Return whether this reader asks a server for entries. */
  readsAt(place: string): boolean {
    return !this.hasEnded && this.#place === place;
  }

  get #place(): string {
    return this.#made.member.server.placeOf(this.#first.roster);
  }

  #planned(): FetchPlanner {
    const budgetBytes = Math.floor(this.#queue.budgetBytes / this.#made.renewers.length);
    return new FetchPlanner(this.#partitions.length, budgetBytes);
  }

  get #first(): PartitionKeys {
    return this.#partitions[0] as PartitionKeys;
  }

  // --- the loop ---

  async #read(): Promise<void> {
    for (;;) {
      try {
        await this.#readToTheEnd();
        return;
      } catch (error) {
        if (!(error instanceof BrokenConnection)) throw error;
        await this.#reconnect(error.why);
      }
    }
  }

  async #readToTheEnd(): Promise<void> {
    const renewer = this.#renewer;
    this.#planner.restart();
    for (;;) {
      const hasMoved = this.#partitions !== renewer.partitions;
      if (hasMoved && this.#asked.length === 0) {
        this.#leaveMoved();
      } else if (hasMoved) {
        // what is asked for comes first: another reader reads the others
      } else if (renewer.hasClaims(this.epoch)) {
        this.#planner.restart();
        if (this.#asked.length === 0) await this.#fetchClaims(false);
      } else {
        const pending = this.#asked.length * this.#planner.requestBytes;
        if (await this.#queue.room(pending, this.#asked.length > 0 ? 0 : ROOM_MS)) this.#ask();
      }
      if (this.#asked.length > 0 && (await this.#endsWith(await this.#takeAnswer()))) return;
    }
  }

  /** Leave partitions that moved to another server to another reader. Nothing may be under way. */
  #leaveMoved(): void {
    this.#partitions = this.#renewer.partitions;
    this.#deliveries.keep(this.#partitions);
    this.#planner = this.#planned();
  }

  /** Return whether an answer with this number of entries is the last one. */
  async #endsWith(taken: number): Promise<boolean> {
    if (taken > 0 || !this.#planner.endsSweep || this.#asked.length > 0) return false;
    // every partition answered "nothing", to requests made after the manifest was read
    if (isEnded(this.#manifest) && (await this.#isOver())) return true;
    await this.#lookAgain();
    return false;
  }

  async #lookAgain(): Promise<void> {
    const { server, stream } = this.#made.member;
    const manifest = await this.#news.ask(() => renewed(server, stream, this.#manifest));
    if (manifest === null) return;
    this.#manifest = manifest;
    if (isEnded(this.#manifest)) this.#planner.restart();
  }

  #ask(): void {
    const { member, connection } = this.#made;
    this.#renewer.raiseError(); // nothing may be read any more under a name that another process took
    const { group, member: name } = member.who;
    for (const request of this.#planner.nextRequests(this.#asked.length, isEnded(this.#manifest))) {
      const key = (this.#partitions[request.partition] as PartitionKeys).entries(this.epoch);
      const read = ["XREADGROUP", "GROUP", group, name, "COUNT", request.most];
      const { blockMs } = request;
      const waitMs = blockMs !== null && this.#others(this.#place) ? Math.min(blockMs, SHARED_BLOCK_MS) : blockMs;
      const answer = connection.call(waitMs, read, ["STREAMS", key, ">"]).then(entriesOfGroup);
      answer.catch(() => {}); // the error is raised where it is awaited
      this.#asked.push({ request, at: now(), answer });
    }
  }

  /** Receive one answer into batches. Returns the number of entries in it. */
  async #takeAnswer(): Promise<number> {
    const { request, at, answer } = this.#asked[0] as Asked;
    const partition = this.#partitions[request.partition] as PartitionKeys;
    let entries: StreamEntry[];
    try {
      entries = await answer;
      // a replaced server may have answered without an error; what cannot be judged now is claimed later
      if (this.#made.connection.server.made !== null) await this.#deliveries.look(() => this.#awaitAcknowledged());
      this.#hold(entries, partition);
      this.#renewer.received(at);
      this.#asked.shift();
    } catch (error) {
      if (error instanceof ServerUnavailable) throw new BrokenConnection(error);
      if (isGone(error)) {
        this.#asked.shift();
        throw await this.#explainGone(partition, (error as Error).message);
      }
      throw error;
    }
    await this.#receive(entries, this.#manifest, partition, this.#assembler, false);
    this.#emit(this.#assembler);
    this.#planner.answered(request, entries.length);
    this.#lostSince.delete(partition);
    this.#outage.over();
    return entries.length;
  }

  /** Return what to raise where a partition has no group for the epoch: BrokenConnection if it has one again soon. */
  async #explainGone(partition: PartitionKeys, said: string): Promise<Error> {
    const { server, stream, who } = this.#made.member;
    const { groups, epochs } = await loadRoster(server, partition);
    const hasLostMember = epochs.includes(this.epoch) || !groups.has(who.group);
    if (hasLostMember && (await rejoin(server, who, partition))) {
      return new BrokenConnection(
        new ServerUnavailable("the server came back without this group, which has joined again"),
      );
    }
    if (!hasLostMember && (await this.#isLostIn(partition))) {
      await sleep(LOST_LOOK_MS);
      return new BrokenConnection(
        new ServerUnavailable(
          `the server came back without epoch ${this.epoch} in partition ${partition.number}: a process that writes ` +
            `'${stream.name}' opens it there again, and so does \`penstock trim\``,
          { isSaid: true },
        ),
      );
    }
    const gone = new EpochNotFound(
      `epoch ${this.epoch} of '${stream.name}' was released, or its group dropped, or the server came back without its ` +
        `newest writes, while it was read (${said})`,
    );
    return await who.runs.explained(gone, partition);
  }

  /** Return whether a partition alone lost the epoch. Raises EpochIncomplete once processes that write look no more. */
  async #isLostIn(partition: PartitionKeys): Promise<boolean> {
    const { member } = this.#made;
    const manifest = await findManifest(member.server, member.stream, this.epoch);
    if (manifest === null || manifest.state === "abandoned" || (await member.isReleased(this.epoch))) return false;
    const since = this.#lostSince.get(partition) ?? now();
    this.#lostSince.set(partition, since);
    if (now() - since > OUTAGE_MS) throw await this.#lossIn(partition, manifest);
    return true;
  }

  async #lossIn(partition: PartitionKeys, manifest: Manifest): Promise<EpochIncomplete> {
    const { server, stream, who } = this.#made.member;
    const { name, partitions } = stream;
    const shards = Array.from({ length: shardCount(manifest) }, (_, shard) => shard);
    const lost = shards.filter((shard) => partitionOf(stream, shard) === partition && shardSize(manifest, shard) > 0);
    const ranges = lost.slice(0, 5).map((shard) => `shard ${shard} offsets 0-${shardSize(manifest, shard) - 1}`);
    const which = `partition ${partition.number} of ${partitions.length} at ${server.whereIs(partition.roster)} has lost it`;
    const error = new EpochIncomplete(
      `group '${who.group}' cannot read epoch ${this.epoch} of '${name}' to its end, and no process opened it again ` +
        `(${[which, ...ranges].join(", ")}): \`penstock trim ${name}\` does, then \`penstock audit ${name} --repair ` +
        "SOURCE...` makes the samples again",
    );
    return await who.runs.explained(error, partition);
  }

  /** Hold entries from the moment on at which they are here, so that they are renewed, and handed back at a close. */
  #hold(entries: readonly StreamEntry[], partition: PartitionKeys): void {
    for (const [id] of entries) {
      this.#made.member.leases.add(new Lease(partition.number, this.epoch, -1, textOf(id) as string, 0));
    }
  }

  async #receive(
    entries: readonly StreamEntry[],
    manifest: Manifest,
    partition: PartitionKeys,
    assembler: Assembler,
    isClaimed: boolean,
  ): Promise<Received[]> {
    const { member, receive } = this.#made;
    const { group } = member.who;
    const found: Received[] = [];
    for (const entry of entries) {
      const isDoubted = this.#deliveries.doubts(partition, manifest.epoch, textOf(entry[0]) as string);
      const scope = { manifest, partition, group, isClaimed: isClaimed || isDoubted };
      const one = await receiveShared(receive, entry, scope, this.#committed);
      found.push(one);
      if (one.kind !== "good") continue;
      const { block, rows, entryId, acknowledged } = one;
      const { shard, count } = block.header;
      const remaining = rows?.length ?? count;
      if (remaining === 0) continue;
      const lease = new Lease(partition.number, manifest.epoch, shard, entryId, remaining, acknowledged);
      member.leases.add(lease);
      assembler.append(block, lease, rows);
      this.#planner.received(one.bytes);
    }
    if (found.some(({ kind }) => kind === "good")) await this.#deadLetters.sawGood();
    await this.#acknowledgeOdd(found, manifest, partition);
    return found;
  }

  /** Deal with entries of which nothing is delivered. */
  async #acknowledgeOdd(received: readonly Received[], manifest: Manifest, partition: PartitionKeys): Promise<void> {
    const { member } = this.#made;
    for (const one of received) {
      if (one.kind === "missing") {
        const lost = "payload lost: the entry was deleted while it was pending";
        await this.#deadLetters.addNow(manifest, partition, one.entryId, lost);
      } else if (one.kind === "good") {
        if (one.rows?.length === 0) await this.#finishEntry(manifest, partition, one.entryId, one);
      } else if (!(one.error instanceof UnsupportedVersion)) {
        if (await isDone(member, partition, manifest, one)) await this.#finishEntry(manifest, partition, one.entryId);
        else {
          const reason = `${one.error.name}: ${one.error.message}`;
          await this.#deadLetters.bury(manifest, partition, one.entryId, reason);
        }
      }
    }
    this.#deadLetters.requireHope();
    for (const one of received) {
      // it stays pending, held like any other, so that leaving hands it back at once
      if (one.kind === "bad" && one.error instanceof UnsupportedVersion) {
        throw notReadHere(member.who, manifest.epoch, one.entryId, one.error);
      }
    }
  }

  /** Acknowledge an entry every sample of which was acknowledged before, and the bits that are known again. */
  async #finishEntry(manifest: Manifest, partition: PartitionKeys, entryId: string, good?: GoodEntry): Promise<void> {
    const { member } = this.#made;
    const ranges = new Map(good === undefined ? [] : [[good.block.header.shard, good.acknowledged]]);
    const call = acknowledgement(partition, manifest, member.who.group, [entryId], ranges);
    await member.server.run("acknowledge", ...call);
    member.leases.remove(partition.number, manifest.epoch, [entryId]);
  }

  #emit(assembler: Assembler): void {
    for (let batch = assembler.take(); batch !== null; batch = assembler.take()) this.#queue.put(batch);
  }

  // --- what the dead left, and this member's own past ---

  /** Receive what is under way before the end, so that it can be handed back at once. */
  async #drain(): Promise<void> {
    for (const { request, answer } of this.#asked.splice(0)) {
      const entries = await answer.catch(() => []);
      this.#hold(entries, this.#partitions[request.partition] as PartitionKeys);
    }
  }

  /**
   * Fetch claimed entries by id and hand them out in batches of their own. They may be of earlier epochs. Suspects come
   * one at a time, and the one that was delivered most often comes last.
   */
  async #fetchClaims(isSuspect: boolean): Promise<void> {
    const renewer = this.#renewer;
    const due = renewer.claims.filter((one) => one.entry.epoch <= this.epoch && one.isSuspect === isSuspect);
    due.sort((a, b) => a.entry.epoch - b.entry.epoch || (isSuspect ? a.entry.deliveries - b.entry.deliveries : 0));
    const todo = isSuspect ? due.slice(0, 1) : due;
    let assembler: Assembler | null = null;
    let epoch = -1;
    const finish = () => {
      assembler?.flush();
      if (assembler !== null) this.#emit(assembler);
      if (assembler !== null && epoch !== this.epoch) this.#made.member.unclosed.add(epoch);
    };
    try {
      for (const claim of todo) {
        if (claim.entry.epoch !== epoch || assembler === null) {
          finish();
          epoch = claim.entry.epoch;
          assembler = new Assembler(this.#made.receive.spec, epoch, this.#made.batchSize);
        }
        await this.#fetch(claim, assembler);
        renewer.claims = renewer.claims.filter((one) => one !== claim); // what could not be fetched is still claimed
      }
    } finally {
      finish();
    }
  }

  async #fetch(claim: ClaimedEntry, assembler: Assembler): Promise<void> {
    const { member, connection, notify } = this.#made;
    const { partition, epoch, entryId } = claim.entry;
    const manifest = epoch === this.epoch ? this.#manifest : await findManifest(member.server, member.stream, epoch);
    if (manifest === null) return member.leases.remove(partition.number, epoch, [entryId]); // released meanwhile
    member.learn(manifest);
    while (!(await this.#queue.room(0, ROOM_MS))) this.#emit(assembler);
    // before its samples are here: if the answer were lost, they would be delivered twice
    if (claim.isSuspect) await this.#renewer.countTurn(claim);
    const found = entriesOf(
      await member.patiently(() => connection.server.call("XRANGE", partition.entries(epoch), entryId, entryId)),
    );
    const missing = [Buffer.from(entryId), null] as unknown as StreamEntry;
    const [received] = await this.#receive([found[0] ?? missing], manifest, partition, assembler, true);
    if (claim.isSuspect) {
      notify(crashNotice(member.who, claim, received?.kind === "good" ? received.block.header : null));
    }
    this.#emit(assembler);
  }

  // --- the end ---

  /** End an epoch with what was there. An epoch that this group still holds goes if it was abandoned, or lost. */
  async #endReleased(error: EpochNotFound): Promise<void> {
    const { member, notify } = this.#made;
    const { stream, group } = member.who;
    try {
      await requireThere(member.server, stream);
      const roster = await loadRoster(member.server, member.begin);
      const record = roster.groups.get(group);
      this.loss = await member.lossOf(this.epoch);
      const isThere = this.loss === "" && !(await member.isReleased(this.epoch));
      if (record === undefined || isThere) throw error;
      this.#assembler.flush();
      this.#emit(this.#assembler);
      // else the other members acknowledged it
      if (this.loss === "" && record.read < this.epoch && !this.#known.isReleaseTold) {
        this.#known.isReleaseTold = true;
        notify(`epoch ${this.epoch} of '${stream.name}' was abandoned and released while it was read`);
      }
      this.#queue.end();
    } catch (worse) {
      this.#queue.end(worse as Error);
    }
  }

  /** Return true once every unacknowledged sample is held here or by a member that proved to be live. */
  async #isOver(): Promise<boolean> {
    const { member } = this.#made;
    const renewer = this.#renewer;
    this.#assembler.flush();
    this.#emit(this.#assembler);
    await this.#requireLive();
    if (this.#manifest.state === "abandoned") return !renewer.hasClaims(this.epoch); // its acknowledgements are refused
    // what was delivered under this name and never arrived, or was acknowledged and lost by the server
    await member.patiently(() => member.attend(this.#partitions));
    await member.patiently(() => renewer.recover(() => member.isAllAcknowledged));
    let beganMs: number | null = null;
    for (;;) {
      if (renewer.hasClaims(this.epoch)) return false;
      if (this.#queue.isStopped) throw new QueueStopped();
      if (renewer.hasClaims(this.epoch, true)) {
        // handed next when it is fetched: then a death is its own
        if (await this.#queue.empty(ROOM_MS)) await this.#fetchClaims(true);
        return false;
      }
      const others = await this.#holders();
      if (others.length > 0) {
        beganMs ??= await serverMs(member.server, this.#first);
        this.#silent = await this.#without(others, beganMs);
      }
      if (others.length === 0 || this.#silent.length === 0) {
        await this.#deadLetters.end(this.#manifest, others.length === 0);
        return true;
      }
      renewer.raiseError();
      if (others.includes("~released")) await member.patiently(() => renewer.look());
      await sleep(HOLDERS_LOOK_MS);
    }
  }

  /** Return the names of other members that hold entries of the epoch. */
  async #holders(): Promise<string[]> {
    const { server, who } = this.#made.member;
    const keys = this.#partitions.map((partition) => ({ partition, epoch: this.epoch }));
    return [...(await pendingMembers(server, keys, who.group))].filter((name) => name !== who.member);
  }

  /** Return those of the names that gave no heartbeat since a moment of the server's clock. */
  async #without(names: readonly string[], sinceMs: number): Promise<string[]> {
    const { server, who } = this.#made.member;
    const { members } = await loadRoster(server, this.#first);
    const live = members.filter((one) => one.group === who.group && one.seenMs > sinceMs);
    return names.filter((name) => !live.some(({ member }) => member === name)).sort();
  }

  /** Raise DamagedKey if no acknowledgement is taken of an epoch that is neither abandoned nor released. */
  async #requireLive(): Promise<void> {
    for (let looks = 0; this.#manifest.state !== "abandoned"; looks += 1) {
      const damaged = await this.#damagedState();
      if (damaged === null) return;
      if (looks > STATE_LOOKS) {
        throw new DamagedKey(
          `${damaged} disagrees with the epoch's manifest: docs/redis-keys.md says what belongs there`,
        );
      }
      await sleep(STATE_LOOK_MS);
      await this.#lookAgain();
    }
  }

  async #damagedState(): Promise<string | null> {
    const { server } = this.#made.member;
    for (const partition of this.#partitions) {
      const key = partition.state(this.epoch);
      const [state, listed] = await Promise.all([
        server.call("GET", key),
        server.call("HGET", partition.roster, `e:${this.epoch}`),
      ]);
      if (textOf(listed) !== null && textOf(state) !== liveState(this.#manifest)) return key;
    }
    return null;
  }

  /** Find what was asked for and not received: it is pending under this name, so it is claimed by id. */
  async #reconnect(error: ServerUnavailable): Promise<void> {
    const renewer = this.#renewer;
    await Promise.allSettled(this.#asked.splice(0).map(({ answer }) => answer));
    if (this.#partitions !== renewer.partitions) this.#leaveMoved(); // their server may be the one that is away
    for (let failure = error; ; ) {
      if (this.#queue.isStopped) throw new QueueStopped();
      renewer.raiseError();
      await this.#outage.bear(failure);
      try {
        await this.#deliveries.look(() => this.#awaitAcknowledged());
        await renewer.recover();
        return;
      } catch (again) {
        if (!(again instanceof ServerUnavailable)) throw again;
        failure = again;
      }
    }
  }

  /** Wait, for a limited time, until the server has again what this member and others acknowledged. */
  async #awaitAcknowledged(): Promise<void> {
    const others = this.#renewer.members > 1 ? sleep(OTHERS_MS) : null;
    await within(this.#made.member.attend(this.#partitions), ACKNOWLEDGED_MS);
    await others;
  }
}

/** Return the entries of an answer of XREADGROUP. RESP2 answers with a list of keys, RESP3 with a map. */
function entriesOfGroup(reply: unknown): StreamEntry[] {
  if (reply === null || reply === undefined) return [];
  if (!Array.isArray(reply)) {
    const [first] = reply instanceof Map ? reply.values() : Object.values(reply);
    return entriesOf(first ?? []);
  }
  if (reply.length === 0) return [];
  if (Array.isArray(reply[0])) return entriesOf(reply[0][1]);
  bytesOf(reply[0]); // a map as names and values in turn
  return entriesOf(reply[1]);
}
