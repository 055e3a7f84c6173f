import { setTimeout as sleep } from "node:timers/promises";
import { BadOption } from "../errors.js";
import type { Server } from "../server/server.js";
import type { BlockingLine } from "../stream/line.js";
import { loadManifest, type Manifest } from "../stream/manifest.js";
import type { Membership } from "../stream/roster.js";
import { loadRoster, unknownGroup } from "../stream/roster.js";
import type { Outage, Wait } from "../waiting.js";
import type { LoaderBatch } from "./batch.js";
import { type Heartbeat, LeaseRenewer } from "./heartbeat.js";
import { Member } from "./member.js";
import type { Chosen } from "./options.js";
import { PrefetchLimit, PrefetchQueue } from "./queue.js";
import type { ReceiveOptions } from "./receive.js";
import { newGroupNotice } from "./sentences.js";
import { SharedReader } from "./sharedReader.js";

const LEASES_LOOK_MS = 20;

/** A reader of one epoch, which fills a prefetch queue. */
export interface EpochReader {
  readonly epoch: number;
  /** Read to the end. Everything ends in the queue, errors too. */
  run(): Promise<void>;
  /** Return why there is no batch. */
  whyWaiting(ms: number): Promise<string>;
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
  readonly line: BlockingLine;
  readonly outage: Outage;
  readonly receive: ReceiveOptions;
  readonly chosen: Chosen;
}

/** A joined member at work, with its heartbeat and the epoch being read. */
export abstract class Reading {
  abstract readonly member: Member;
  abstract readonly heartbeat: Heartbeat;
  /** Whether acknowledgement is by position: everything up to a batch. */
  abstract readonly isOrdered: boolean;
  run: EpochRun | null = null;
  /** The last epoch that was iterated to its end here. */
  cursor = -1;
  readonly #limit: PrefetchLimit;

  constructor({ chosen }: Resources) {
    this.#limit = new PrefetchLimit(chosen.prefetchBytes);
  }

  protected abstract readerOf(manifest: Manifest, queue: PrefetchQueue): EpochReader | Promise<EpochReader>;

  /** Return the next epoch, or null if there is none yet. Raises GroupFinished. */
  async nextEpoch(): Promise<number | null> {
    return await this.member.nextEpoch(this.cursor);
  }

  /** Start reading an epoch. */
  async begin(epoch: number): Promise<EpochRun> {
    const queue = new PrefetchQueue(this.#limit);
    const manifest = await loadManifest(this.member.server, this.member.stream, epoch);
    const reader = await this.readerOf(manifest, queue);
    this.heartbeat.readEpoch(epoch);
    this.run = { reader, queue, ended: reader.run() };
    return this.run;
  }

  /** End an epoch that was read to its end. */
  async finish(run: EpochRun): Promise<void> {
    await run.ended;
    this.run = null;
    this.cursor = Math.max(this.cursor, run.reader.epoch);
  }

  /** Stop reading, with everything that was read ahead. */
  async stop(): Promise<void> {
    const { run } = this;
    run?.queue.stop();
    await run?.ended;
    this.run = null;
  }

  /** Return what a state says of the place behind a batch. */
  here(last: LoaderBatch | null): { epoch: number | null; position?: number } {
    return { epoch: last?.epoch ?? null };
  }

  /** Find what is left for this member in an epoch that it has read and that did not close. */
  async takeUp(): Promise<void> {}

  /** Return whether the entries received are known to be this member's still. */
  get isFresh(): boolean {
    return true;
  }

  /** Return once `isFresh` is true: a process that stood still may hold what another one has taken over. */
  async awaitLeases(wait: Wait): Promise<void> {
    while (!this.isFresh) {
      await wait.because("leases", () => "the server, to renew the leases of what is handed out next");
      await sleep(LEASES_LOOK_MS);
      this.heartbeat.raiseError();
    }
  }
}

/** Reading through a consumer group. Entries that were handed back, or left by the dead, are claimed and read again. */
export class SharedReading extends Reading {
  override readonly member: Member;
  override readonly heartbeat: LeaseRenewer;
  override readonly isOrdered = false;
  readonly #made: Resources;

  constructor(made: Resources, who: Membership) {
    super(made);
    this.#made = made;
    const { server, outage, chosen } = made;
    this.member = new Member(server, who, outage);
    this.heartbeat = new LeaseRenewer(server, who, this.member.leases, chosen.leaseMs, chosen.notify);
  }

  /** Join the group, and find what an earlier process of this name was given. */
  async join(): Promise<void> {
    await this.member.join(this.#made.chosen.start);
    await this.member.patiently(() => this.heartbeat.recover());
    await this.member.patiently(() => this.heartbeat.look());
    this.heartbeat.start();
  }

  protected override readerOf(manifest: Manifest, queue: PrefetchQueue): EpochReader {
    const { member, heartbeat: renewer } = this;
    const { line, receive, chosen } = this.#made;
    const { batchSize, notify } = chosen;
    return new SharedReader({ member, renewer, line, receive, batchSize, notify }, manifest, queue);
  }

  /** Return an earlier epoch again if a member that held a part of it died, or if what it lacked was repaired. */
  override async nextEpoch(): Promise<number | null> {
    const repaired: number[] = [];
    for (const epoch of this.member.unclosed) if (await this.member.hasUnread(epoch)) repaired.push(epoch - 1);
    this.#goBack(repaired);
    const found = await super.nextEpoch();
    this.heartbeat.members = this.member.members;
    return found;
  }

  override async takeUp(): Promise<void> {
    await this.member.patiently(() => this.heartbeat.recover(() => this.member.isAllAcknowledged));
    this.#goBack([]);
  }

  #goBack(epochs: readonly number[]): void {
    this.cursor = Math.min(this.cursor, ...this.heartbeat.claims.map(({ entry }) => entry.epoch - 1), ...epochs);
  }

  override get isFresh(): boolean {
    return this.heartbeat.isFresh;
  }
}

/**
 * Join the group and keep its member alive from now on. A new group beside others is announced.
 *
 * @throws GroupBusy, EpochsReleased, EpochNotFound, GroupKindMismatch or GroupNotFound.
 */
export async function openReading(made: Resources, who: Membership): Promise<Reading> {
  const { create, notify } = made.chosen;
  if (who.order !== null) throw new BadOption("order: this version reads without ranks only");
  const reading = new SharedReading(made, who);
  const { groups } = await loadRoster(reading.member.server, reading.member.begin);
  if (!create && !groups.has(who.group)) throw unknownGroup(who.stream.name, who.group, groups.keys());
  await reading.join();
  if (groups.size > 0 && !groups.has(who.group)) {
    notify(newGroupNotice(who.group, [...groups.keys()].sort(), reading.member.first));
  }
  return reading;
}
