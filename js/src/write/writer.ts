// The public `Writer`: it opens streams, epochs and the endless feed, with the options of `openWriter`, among them the
// retention policy. It decides when a feed goes on to the next epoch.

import { BadOption, PenstockError, ServerUnsuitable } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { readableBytes } from "../printable.js";
import { addressOf, SERVER_OPTIONS, Server, type ServerOptions } from "../server/client.js";
import { StallDetector } from "../server/stallDetector.js";
import { Durability, ReplicaWatch } from "../stream/durability.js";
import { checkedName } from "../stream/keys.js";
import type { Manifest } from "../stream/manifest.js";
import { findStream, type Stream } from "../stream/stream.js";
import { type Notify, now, Outage, toStderr } from "../waiting.js";
import { whole } from "../whole.js";
import { MAX_SHARD_SAMPLES } from "../wire/limits.js";
import type { Spec } from "../wire/spec.js";
import type { WriterContext } from "./context.js";
import { openEpoch } from "./epochs.js";
import { EpochWriter } from "./epochWriter.js";
import { isSealed } from "./feed.js";
import { admitStream, ServerMemoryQuota } from "./memory.js";
import { AdmissionOrder } from "./order.js";
import { checkRows, inferRows, type RowsLike } from "./rows.js";
import { notAwaited, type ShardWriter } from "./shard.js";
import { inferSpec, type SampleLike, type SpecLike, specLike } from "./spec.js";
import { createStream } from "./streamCreation.js";
import { Trimmer } from "./trimmer.js";
import { WriterCore } from "./writerCore.js";

/** A feed starts a new epoch after this share of the budget, so that old epochs can be released. */
const FEED_SHARE = 1 / 8;
/** A feed checks after so many samples or ms, once a block at most, whether another writer sealed its epoch. */
const SEAL_CHECK = 64;
const SEAL_CHECK_MS = 1000;
/** The samples of a feed that may come at once between two checks of its length. */
const MAX_STEP = 2 ** 16;
const RETENTION = /^(budget|epochs:\d{1,9}|time:\d{1,9}[smhd]|bytes:\d{1,15}(?:\.\d{1,9})?[kmgt]?b?)$/;
const UNITS = ["", "k", "m", "g", "t"];

/** How a stream is written. What is left out keeps the value of an existing stream. */
export interface WriterOptions extends ServerOptions {
  /** The tensors of a sample. Left out, the first sample decides. */
  readonly spec?: SpecLike;
  /** The partitions of a new stream. Default 1. */
  readonly partitions?: number;
  /**
   * The payload bytes that the stream may hold, also an existing one. Default of a new stream: 1 GiB, or half of what
   * the other streams leave of maxmemory.
   */
  readonly budgetBytes?: number;
  /** The payload bytes of one entry of a new stream. Default 1,000,000. */
  readonly blockBytes?: number;
  /** What is kept of acknowledged epochs: `budget`, `epochs:3`, `time:24h` or `bytes:500mb`. */
  readonly retention?: string;
  /** What must have happened to a write: `auto`, `memory`, `fsync`, `replicas=2` or `fsync+replicas=2`. Default `auto`. */
  readonly durability?: string;
  /** Facts about the stream for its readers, such as the names of classes. */
  readonly info?: Readonly<Record<string, unknown>>;
  /** Put the checksum of the payload into each entry. Default true. */
  readonly checksum?: boolean;
  /** The longest wait for space in a full budget. Default: as long as it takes. `BudgetFull` ends it. */
  readonly roomWaitMs?: number;
  /** Takes each line for the user. Default: stderr. */
  readonly notify?: Notify;
}

const OPTIONS = {
  spec: true,
  partitions: true,
  budgetBytes: true,
  blockBytes: true,
  retention: true,
  durability: true,
  info: true,
  checksum: true,
  roomWaitMs: true,
  notify: true,
  ...SERVER_OPTIONS,
} satisfies OptionNames<WriterOptions>;

/** How an epoch is opened. */
export interface EpochOptions {
  /** The samples of each shard, if they are planned. */
  readonly sizes?: readonly number[];
  readonly seed?: number;
  /** The source's fingerprint. Producers with different fingerprints cannot share an epoch. */
  readonly fingerprint?: string;
}

const OF_EPOCH = { sizes: true, seed: true, fingerprint: true } satisfies OptionNames<EpochOptions>;

/**
 * Open a stream to write to it, and make it if it does not exist.
 *
 * @throws ServerUnavailable, ServerUnsuitable, BudgetRefused, or StreamConflict if it exists with another spec.
 * @example
 * const writer = await openWriter("train", { budgetBytes: 2 ** 30 });
 * const epoch = await writer.epoch();
 * await epoch.write({ x: image, y: 3 });
 * await epoch.close();
 * await writer.close();
 */
export async function openWriter(stream: string, options: WriterOptions = {}): Promise<Writer> {
  checkOptions("openWriter", options, OPTIONS);
  const { notify = toStderr, partitions, budgetBytes, blockBytes, roomWaitMs } = options;
  for (const [name, value] of Object.entries({ partitions, budgetBytes, blockBytes })) {
    if (value !== undefined) whole(name, value, 1);
  }
  if (roomWaitMs !== undefined && !(roomWaitMs >= 0)) throw new BadOption(`roomWaitMs is ${roomWaitMs}`);
  const spec = options.spec === undefined ? undefined : specLike(options.spec);
  const retention = options.retention === undefined ? undefined : policyOf(options.retention);
  checkedName("stream", stream);
  const server = await Server.open(options);
  const outage = new Outage(notify, "asking the server");
  const control = server.patient(outage);
  const stallDetector = new StallDetector([server], addressOf(options), notify);
  try {
    const context = await prepare(control, stream, { ...options, notify, spec, retention });
    const shared = {
      memory: new ServerMemoryQuota(control),
      order: new AdmissionOrder(control, context.stream),
      trimmer: new Trimmer(control, context.stream),
    };
    const { checksum = true } = options;
    const core = new WriterCore({
      ...context,
      ...shared,
      replicas: await watched(server, context.stream),
      server,
      control,
      notify,
      checksum,
      roomWaitMs: roomWaitMs ?? null,
      stallDetector,
    });
    return new Writer(core, () => {
      outage.patienceMs = 0;
      stallDetector.stop();
      server.close();
    });
  } catch (error) {
    stallDetector.stop();
    server.close();
    throw error;
  }
}

/** Learn which servers of a stream have replicas. One that is cut off later is waited for then. */
async function watched(server: Server, { durability, keys, partitions }: Stream): Promise<ReplicaWatch> {
  const [watch, level] = [new ReplicaWatch(server), new Durability(durability)];
  for (const key of [keys.meta, ...partitions.map(({ roster }) => roster)]) await watch.level(level, key);
  return watch;
}

async function prepare(
  server: Server,
  name: string,
  options: Omit<WriterOptions, "spec" | "retention"> & {
    readonly notify: Notify;
    readonly spec: Spec | undefined;
    readonly retention: string | undefined;
  },
): Promise<Pick<WriterContext, "stream">> {
  const found = await findStream(server, name);
  if (found !== null && found.payload !== "inline") {
    throw new ServerUnsuitable(
      `stream '${name}' keeps its payloads in ${found.payload}, which Node does not write: write it with Python, or make ` +
        "a stream with payload inline",
    );
  }
  const level = new Durability(options.durability ?? found?.durability ?? "memory");
  await level.require(server, found?.durability === level.text);
  const budgetBytes = await admitStream(server, name, options.budgetBytes, options.notify);
  const durability = options.durability === undefined ? undefined : level.text;
  const stream = await createStream(server, name, { ...options, budgetBytes, durability });
  if (found !== null && found.budgetBytes !== stream.budgetBytes) {
    const [now, before] = [stream, found].map((one) => readableBytes(one.budgetBytes));
    options.notify(`the budget of stream '${name}' is ${now} from now on; it was ${before}`);
  }
  return { stream };
}

/** Return a retention policy as Python stores it. Raises BadOption. */
function policyOf(text: string): string {
  const policy = text.trim().toLowerCase();
  if (!RETENTION.test(policy)) {
    throw new BadOption(
      `retention '${text}' is not one of: budget (keep all until space is needed), epochs:N (the newest N), ` +
        "time:DURATION as 90m, 24h or 7d, or bytes:SIZE as 500mb",
    );
  }
  const [kind, amount = ""] = policy.split(":");
  if (kind === "epochs") return `epochs:${Number(amount)}`;
  if (kind !== "bytes") return policy;
  const [, size, unit = ""] = /^([\d.]+)([kmgt]?)b?$/.exec(amount) as RegExpExecArray;
  return `bytes:${Math.floor(Number(size) * 1024 ** UNITS.indexOf(unit))}`;
}

/** A writer of samples, into epochs or an endless feed. See `openWriter`. */
export class Writer {
  readonly #core: WriterCore;
  readonly #disconnect: () => void;
  #begun: EpochWriter | null = null;
  #feed: ShardWriter | null = null;
  #feedEpoch: () => number = () => 0;
  /** The samples written to the feed since the last look whether its epoch is sealed. */
  #feedCount = 0;
  /** The end of what the feed's shard had sent at the last look, and when the next one is due. */
  #lookedAt = 0;
  #checkDueAt = 0;
  #isOpening = false;

  constructor(core: WriterCore, disconnect: () => void) {
    this.#core = core;
    this.#disconnect = disconnect;
  }

  /** The tensors of a sample, or null until the first sample fixes them. */
  get spec(): Spec | null {
    return this.#core.stream.spec;
  }

  /**
   * Open an epoch.
   *
   * @param number The number of the epoch, whether it exists or not. Left out, it is the next one.
   */
  async epoch(number?: number | null, options: EpochOptions = {}): Promise<EpochWriter> {
    this.#core.requireOpen();
    checkOptions("epoch", options, OF_EPOCH);
    if (number !== undefined && number !== null && !Number.isSafeInteger(number)) {
      throw new BadOption(`epoch is ${number}, expected an integer`);
    }
    const { control, stream } = this.#core;
    let opened: Manifest | null = null;
    const manifest = await this.#core.onAllReplicas(async () => {
      opened = await openEpoch(control, stream, opened?.epoch ?? number ?? null, options, opened);
      return opened;
    });
    this.#begun = new EpochWriter(this.#core, manifest, number === undefined || number === null);
    return this.#begun;
  }

  /** Add a sample to the stream's endless feed, exactly once in this writer's life. */
  async write(sample: SampleLike): Promise<void> {
    const feed = await this.#feeding(() => inferSpec(sample));
    await feed.write(sample);
    this.#feedCount += 1;
  }

  /** Add n samples to the endless feed. See `ShardWriter.writeBatch`. */
  async writeBatch(rows: RowsLike): Promise<void> {
    const checked = checkRows(await this.#core.requireSpec(() => inferRows(rows)), rows);
    for (let at = 0; at < checked.count; at += MAX_STEP) {
      const end = Math.min(checked.count, at + MAX_STEP);
      const feed = await this.#feeding(() => inferRows(rows));
      await feed.writeRows(checked, at, end);
      this.#feedCount += end - at;
    }
  }

  /** Record in the endless feed that the next sample could not be made, and why. */
  async quarantine(reason: string): Promise<void> {
    const feed = await this.#feeding(() => {
      throw new PenstockError("the first sample of a stream without spec cannot be a bad one: give spec");
    });
    await feed.quarantine(reason);
    this.#feedCount += 1;
  }

  /** The samples of the endless feed that are not known to be committed yet. */
  get uncommitted(): number {
    return this.#feed === null ? 0 : this.#feed.position - this.#feed.committed;
  }

  /** Return once everything written to the endless feed, and to the epoch that was opened last, is committed. */
  async flush(): Promise<void> {
    await this.#begun?.flush();
    await this.#feed?.commitAll();
  }

  /**
   * End the feed's epoch, if one was begun, and close the connection. Of a failure the feed ends as committed.
   *
   * An epoch that was opened last and not closed stays open. What was written to it is committed.
   */
  async close(): Promise<void> {
    if (this.#core.isClosed) return;
    try {
      await this.#leaveEpoch();
      await this.#endFeed();
    } catch (error) {
      // what was committed stands, and its epoch must end, because trainers would wait for it
      await this.#feed?.closeAsCommitted().catch(() => this.#feed?.abort());
      throw error;
    } finally {
      this.#core.isClosed = true;
      this.#disconnect();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  async #leaveEpoch(): Promise<void> {
    const epoch = this.#begun;
    if (epoch?.isLeft !== true) return;
    await epoch.flush();
    const { name } = this.#core.stream;
    this.#core.notify(
      `epoch ${epoch.number} of '${name}' stays open, and trainers wait for its end: await its close() before the ` +
        `writer's; \`penstock epochs close ${name} ${epoch.number}\` ends it now`,
    );
  }

  async #feeding(infer: () => Spec): Promise<ShardWriter> {
    if (this.#isOpening) throw notAwaited();
    const feed = this.#feed;
    if (feed !== null && this.#feedCount < SEAL_CHECK && !this.#isLong(feed) && !this.#isCheckDue(feed)) return feed;
    this.#isOpening = true;
    try {
      if (feed !== null && (await this.#isStretchOver(feed))) await this.#endFeed();
      if (this.#feed !== null) return this.#feed;
      this.#core.requireOpen();
      this.#tellMistaken();
      await this.#core.requireSpec(infer);
      const { shard, epoch } = await this.#core.openFeed();
      this.#feed = shard;
      this.#feedEpoch = epoch;
      this.#feedCount = this.#lookedAt = 0;
      this.#checkDueAt = now() + SEAL_CHECK_MS;
      return shard;
    } finally {
      this.#isOpening = false;
    }
  }

  #isLong(feed: ShardWriter): boolean {
    return feed.position >= MAX_SHARD_SAMPLES - MAX_STEP || feed.bytesWritten > this.#core.partitionBudget * FEED_SHARE;
  }

  #isCheckDue(feed: ShardWriter): boolean {
    return feed.sent > this.#lookedAt && now() >= this.#checkDueAt;
  }

  async #isStretchOver(feed: ShardWriter): Promise<boolean> {
    if (this.#isLong(feed)) return true;
    const before = this.#lookedAt;
    this.#feedCount = 0;
    this.#lookedAt = feed.sent;
    this.#checkDueAt = now() + SEAL_CHECK_MS;
    return feed.sent > before && (await isSealed(this.#core.control, this.#core.stream, this.#feedEpoch()));
  }

  async #endFeed(): Promise<void> {
    await this.#feed?.close(); // if it fails, the feed stays, or its epoch would never end
    this.#feed = null;
  }

  /** Say that the open epoch stays empty, because a call of the writer's own `write` probably means the epoch. */
  #tellMistaken(): void {
    const epoch = this.#begun;
    if (epoch === null || !epoch.isUntouched) return;
    this.#core.notify(
      `writer.write() goes to the endless feed of '${this.#core.stream.name}', and epoch ${epoch.number}, which is open, ` +
        "stays empty: to write into it call the write() of what writer.epoch() returned",
    );
  }
}
