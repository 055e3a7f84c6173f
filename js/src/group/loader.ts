// The public `Loader`: iteration, the waits for a stream, an epoch and a batch, checkpoint, state and closing.

import { randomBytes } from "node:crypto";
import type { DatasetOf, TfLike } from "../adapters/tf.js";
import { type DatasetControls, type DatasetOptions, dataset } from "../adapters/tfjs.js";
import { BadOption, EpochIncomplete, GroupFinished, PenstockError, StreamNotFound, WaitTimeout } from "../errors.js";
import { SegmentReader } from "../segments/reader.js";
import { addressOf, Server } from "../server/client.js";
import { StallDetector } from "../server/stallDetector.js";
import { near } from "../spelling.js";
import { BlockingConnection } from "../stream/blockingConnection.js";
import { listStreams } from "../stream/directory.js";
import { awaitEvent, lastEvent } from "../stream/events.js";
import { checkedName, StreamKeys } from "../stream/keys.js";
import { findManifest } from "../stream/manifest.js";
import { newIncarnation } from "../stream/presence.js";
import { ServerRuns } from "../stream/serverRuns.js";
import { absence, findStream, loadStream, requireSpec, type Stream } from "../stream/stream.js";
import { OUTAGE_MS, Outage, Wait } from "../waiting.js";
import type { Spec } from "../wire/spec.js";
import { Acknowledger } from "./acknowledger.js";
import { BackgroundQuery } from "./backgroundQuery.js";
import type { LoaderBatch } from "./batch.js";
import {
  type Acknowledge,
  type Chosen,
  checkState,
  chosen,
  identityOf,
  type LoaderOptions,
  type LoaderState,
} from "./options.js";
import { openReading, type Reading } from "./reading.js";
import { unlessAway } from "./sentences.js";

/** A misspelt stream is reported after this time. A trainer may start before its producer. */
const STARTUP_MS = 60_000;
/** The length of one wait for an event. It is finite, because an event may be lost with the server's memory. */
const EVENT_MS = 1000;
const POLL_MS = 500;
/** How long closing waits for a server that is away. */
const LEAVE_MS = 2000;

/** What a loader reads. */
export interface LoaderFacts {
  readonly spec: Spec;
  /** The first epoch that the group reads. */
  readonly firstEpoch: number;
  /** The producer's facts about the stream, such as the names of classes. */
  readonly info: Record<string, unknown>;
}

interface Opened {
  readonly server: Server;
  readonly connection: BlockingConnection;
  readonly stallDetector: StallDetector;
  readonly outage: Outage;
  readonly segments: SegmentReader | null;
  readonly spec: Spec;
  readonly reading: Reading;
  readonly acknowledger: Acknowledger;
}

/** The batches of a stream for one member of a group. See `load`. */
export class Loader implements AsyncIterable<LoaderBatch> {
  readonly #name: string;
  readonly #options: LoaderOptions;
  readonly #chosen: Chosen;
  /** The number in a state, which counts batches of one loader. */
  readonly #life = randomBytes(8).toString("hex");
  #opened: Promise<Opened> | null = null;
  #known: Opened | null = null;
  #iterations = 0;
  #isToldFinished = false;
  #isClosed = false;
  #closing: Promise<void> | null = null;

  constructor(stream: string, options: LoaderOptions) {
    this.#name = checkedName("stream", stream);
    this.#options = options;
    this.#chosen = chosen(options);
  }

  /** When a batch counts as trained on. */
  get acknowledge(): Acknowledge {
    return this.#chosen.acknowledge;
  }

  /**
   * Connect and join the group. The first iteration does the same.
   *
   * @throws ServerUnavailable, StreamNotFound, GroupNotFound, GroupBusy, GroupKindMismatch, EpochsReleased,
   *   EpochNotFound, StateMismatch, ReplayTruncated or SegmentsUnseen.
   */
  async open(): Promise<LoaderFacts> {
    const { spec, reading } = await this.#open();
    return { spec, firstEpoch: reading.member.first, info: reading.member.stream.info };
  }

  /** Yield the batches of the group's next epoch, or of a feed. */
  async *[Symbol.asyncIterator](): AsyncGenerator<LoaderBatch, void, void> {
    this.#iterations += 1;
    const mine = this.#iterations;
    const opened = await this.#open();
    const { reading, acknowledger } = opened;
    await acknowledger.askedForNext();
    let isEmpty = true;
    let unfinished: number | null = null;
    for (;;) {
      const next = () => (unfinished === null ? this.#awaitEpoch(opened, isEmpty) : this.#due(opened, unfinished));
      const epoch: number | null = reading.run?.reader.epoch ?? (await next());
      if (epoch === null) return;
      if (reading.run === null && !(await reading.begin(epoch))) continue;
      for (;;) {
        const batch = await this.#nextBatch(opened);
        if (batch === null) break;
        isEmpty = false;
        yield acknowledger.hand(batch);
        this.#requireMine(mine);
        await acknowledger.askedForNext();
      }
      if (this.#isClosed) return;
      const isLost = (reading.run?.reader.loss ?? "") !== "";
      const runsOn = await this.#finish(opened, epoch);
      // below it: something of it is still due
      if (!runsOn && !isEmpty && reading.cursor >= epoch) return;
      // others may read what is due. An epoch that a server lost as a whole is waited for instead
      unfinished = runsOn || isEmpty || isLost ? null : epoch;
    }
  }

  /**
   * Return the batches as a `tf.data.Dataset`, each iteration an epoch. It needs `acknowledge: "manual"`, and acknowledges a
   * batch after the steps that used it. See `dataset`.
   */
  dataset<T extends TfLike>(tf: T, options: DatasetOptions): DatasetOf<T> & DatasetControls {
    return dataset(this, tf, options);
  }

  /**
   * Acknowledge everything that was delivered so far, because a checkpoint of it is durable.
   *
   * @returns Where the loader stands, as `state()`.
   */
  async checkpoint(): Promise<LoaderState> {
    const { acknowledger } = await this.#open();
    await acknowledger.checkpoint();
    return this.state();
  }

  /** Return where the loader stands: behind the batch that was delivered last. */
  state(): LoaderState {
    if (this.#known === null) throw new BadOption("a loader has no state before its first batch, or `open()`");
    const { reading, spec, acknowledger } = this.#known;
    const { last, batches, samples } = acknowledger;
    const identity = identityOf(reading.member.stream, spec, this.#chosen);
    return { ...identity, loader: this.#life, batches, samples, ...reading.here(last) };
  }

  /**
   * Hand back what was not acknowledged, and leave the group. The batch of a loop that was left early counts as not
   * acknowledged.
   *
   * @throws ServerUnavailable if an acknowledgement could not be sent. Its batch is delivered again.
   */
  close(): Promise<void> {
    this.#closing ??= this.#end();
    return this.#closing;
  }

  async #end(): Promise<void> {
    this.#isClosed = true;
    if (this.#opened === null) return;
    const opened = await this.#opened.catch(() => null);
    if (opened !== null) await this.#leave(opened);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // --- opening ---

  #open(): Promise<Opened> {
    if (this.#isClosed) return Promise.reject(new PenstockError(`this loader of '${this.#name}' is closed`));
    this.#opened ??= this.#connect();
    return this.#opened;
  }

  async #connect(): Promise<Opened> {
    const { notify, timeoutMs, acknowledge } = this.#chosen;
    const outage = new Outage(notify, "asking the server", Math.min(OUTAGE_MS, timeoutMs ?? OUTAGE_MS));
    const server = await outage.through(() => Server.open(this.#options));
    const closing: (() => unknown)[] = [() => server.close()];
    try {
      const connection = await outage.through(() => BlockingConnection.open(server));
      closing.unshift(() => connection.close());
      const stallDetector = new StallDetector([server, connection.server], addressOf(this.#options), notify);
      closing.unshift(() => stallDetector.stop());
      const stream = await this.#awaitStream(server.patient(outage), connection, stallDetector);
      const spec = requireSpec(stream);
      const segments = await SegmentReader.of(stream);
      closing.unshift(() => segments?.close());
      const { checksum, order, group, member } = this.#chosen;
      const receive = { server: server.patient(outage), stream, spec, segments, checksum };
      const runs = new ServerRuns(server, stream);
      const who = { stream, group, member, order, incarnation: newIncarnation(), runs };
      const { state } = this.#options;
      const place = state === undefined ? null : checkState(state, identityOf(stream, spec, this.#chosen));
      const isClosed = () => this.#isClosed;
      const reading = await openReading(
        { server, connection, outage, receive, chosen: this.#chosen, isClosed, place },
        who,
      );
      const acknowledger = new Acknowledger(acknowledge, reading);
      this.#known = { server, connection, stallDetector, outage, segments, spec, reading, acknowledger };
      return this.#known;
    } catch (error) {
      for (const close of closing) await close();
      throw error;
    }
  }

  /** Return the stream once it has a spec. Raises StreamNotFound. */
  async #awaitStream(server: Server, connection: BlockingConnection, stallDetector: StallDetector): Promise<Stream> {
    const { wait: waits, notify, timeoutMs } = this.#chosen;
    if (!waits) await loadStream(server, this.#name);
    const name = this.#name;
    const keys = new StreamKeys(name);
    const wait = new Wait(notify, timeoutMs ?? STARTUP_MS, stallDetector);
    let isMisspelt: boolean | null = null;
    for (;;) {
      const event = await lastEvent(server, keys);
      const stream = await findStream(server, name);
      if (stream !== null && stream.spec !== null) return stream;
      try {
        if (stream === null) {
          isMisspelt ??= near(name, await listStreams(server)) !== "";
          await wait.because("stream", () => absence(server, name), isMisspelt ? { firstWordMs: 0 } : {});
        } else await wait.because("spec", () => `stream '${name}' has no sample yet: is a producer running?`);
      } catch (error) {
        throw error instanceof WaitTimeout && stream === null ? new StreamNotFound(error.message) : error;
      }
      if (this.#isClosed) throw new PenstockError(`this loader of '${name}' is closed`);
      await awaitEvent(connection, keys, event, EVENT_MS);
    }
  }

  // --- waiting ---

  /** Return the next epoch of the group, or null if it has read all epochs and this loader had its share. */
  async #awaitEpoch(
    { reading, connection, stallDetector, outage, acknowledger }: Opened,
    isEmpty: boolean,
  ): Promise<number | null> {
    const { notify, timeoutMs } = this.#chosen;
    const wait = new Wait(notify, timeoutMs, stallDetector);
    const isFresh = acknowledger.batches === 0;
    const { member, heartbeat } = reading;
    const { keys } = member.stream;
    while (!this.#isClosed) {
      try {
        const event = await lastEvent(member.server, keys);
        const epoch = await reading.nextEpoch();
        if (epoch !== null) {
          heartbeat.tellIdle(null);
          return epoch;
        }
        heartbeat.tellIdle({ idleMs: wait.ms, handedBytes: acknowledger.handedBytes });
        const nothing = `stream '${this.#name}' has no epoch to read now`;
        const more = async () => {
          const found = await unlessAway(member.finished(reading.cursor), nothing);
          return `${found}; is a producer running?`;
        };
        await wait.because("epoch", more, isFresh && timeoutMs === null ? { limitMs: STARTUP_MS } : {});
        heartbeat.raiseError();
        await outage.through(() => awaitEvent(connection, keys, event, EVENT_MS));
      } catch (error) {
        if (this.#isClosed) return null;
        if (!(error instanceof GroupFinished) || isFresh || this.#isToldFinished || !isEmpty) throw error;
        this.#isToldFinished = true;
        notify(error.message);
        return null;
      }
    }
    return null;
  }

  /** Return the epoch to continue with, or null if other members have read the rest. */
  async #due({ reading }: Opened, unfinished: number): Promise<number | null> {
    try {
      const epoch = await reading.nextEpoch();
      return epoch !== null && epoch <= unfinished ? epoch : null;
    } catch (error) {
      if (error instanceof GroupFinished) return null;
      throw error;
    }
  }

  /** Return the next batch, or null at the epoch's end. */
  async #nextBatch({ reading, stallDetector, acknowledger, spec }: Opened): Promise<LoaderBatch | null> {
    const { notify, timeoutMs } = this.#chosen;
    const { run, heartbeat } = reading;
    if (run === null) return null; // closed meanwhile
    const wait = new Wait(notify, timeoutMs, stallDetector);
    const telling = new BackgroundQuery<void>(POLL_MS);
    for (;;) {
      const queued = await run.queue.get(POLL_MS, (batch) => reading.awaitLeases(batch, wait));
      heartbeat.raiseError();
      const batch = queued?.withoutLost(spec) ?? null;
      if (batch !== null || run.queue.isOver || this.#isClosed) {
        heartbeat.tellIdle(null);
        return this.#isClosed ? null : batch;
      }
      heartbeat.tellIdle({ idleMs: wait.ms, handedBytes: acknowledger.handedBytes });
      // a server that is away may have the reason, while others have the next batch
      await telling.ask(() => wait.because("batch", () => run.reader.whyWaiting(wait.ms)));
    }
  }

  /** End an epoch that was read to its end. Returns whether the iteration goes on into the next one, as in a feed. */
  async #finish({ reading, acknowledger }: Opened, epoch: number): Promise<boolean> {
    const { run, member } = reading;
    if (run !== null) await reading.finish(run);
    const manifest = await findManifest(member.server, member.stream, epoch);
    if (manifest?.state === "abandoned") {
      this.#chosen.notify(`epoch ${epoch} of '${this.#name}' was abandoned: it ends with what was there`);
    }
    await acknowledger.endEpoch(epoch);
    if (member.unclosed.has(epoch)) await reading.takeUp(epoch);
    return manifest?.kind === "feed";
  }

  #requireMine(iteration: number): void {
    if (this.#isClosed) throw new PenstockError(`this loader of '${this.#name}' is closed`);
    if (iteration === this.#iterations) return;
    throw new PenstockError(
      `this loader of '${this.#name}' is read by another loop, and asking for the next batch acknowledges the one ` +
        "before: make a loader for each loop, with the same group and member names of their own",
    );
  }

  // --- the end ---

  async #leave({ reading, acknowledger, segments, outage, stallDetector, connection, server }: Opened): Promise<void> {
    const { member, heartbeat } = reading;
    outage.patienceMs = LEAVE_MS;
    acknowledger.close();
    const epoch = reading.run?.reader.epoch;
    const left = acknowledger.unacknowledged;
    try {
      await reading.stop(); // a wait for a batch ends
      await member.confirm();
      if (left > 0) {
        this.#chosen.notify(`${left} samples were handed out and not acknowledged: they are handed out again`);
      }
    } finally {
      await heartbeat.stop();
      if (epoch !== undefined) member.unclosed.add(epoch);
      try {
        await this.#signOff(reading);
      } finally {
        member.stop();
        stallDetector.stop();
        connection.close();
        await segments?.close();
        server.close();
      }
    }
  }

  /** Close the epochs that are acknowledged by now, and leave. */
  async #signOff({ member }: Reading): Promise<void> {
    for (const epoch of [...member.unclosed]) {
      try {
        await member.closeEpochs(epoch);
      } catch (error) {
        if (!(error instanceof EpochIncomplete)) return; // the server is gone: the leases lapse by themselves
      }
    }
    await member.leave().catch(() => {});
  }
}
