// Sends acknowledgements without making the training loop wait for each answer, and sends those again that a failover
// may have lost.

import type { Argument, Server } from "../server/client.js";
import { ReplicaProbe } from "../stream/confirmed.js";
import type { PartitionKeys } from "../stream/keys.js";
import { RunWatch } from "../stream/serverRuns.js";
import type { Stream } from "../stream/stream.js";
import { ELSEWHERE_MS, LATE, within } from "./backgroundQuery.js";

/** Acknowledgements under way at once. Those that a crash of the server loses are delivered again. */
const UNANSWERED = 8;
/** Answered acknowledgements that are kept. A server loses its newest writes, so the newest ones are enough. */
const KEPT = 1024;
/** The time between two looks whether the server is another one, and whether a replica has the acknowledgements. */
const LOOK_EVERY_MS = 1000;
/** The longest time that such a question holds up what is sent behind it. */
const ASK_MS = 20;
/** The longest wait for a replica at the end of an epoch, and when a member leaves. */
const CONFIRM_MS = 1000;

/** Runs a script. */
export type RunScript = (script: string, keys: readonly string[], args: readonly Argument[]) => Promise<unknown>;

type Call = Parameters<RunScript>;

interface Sent {
  readonly answer: Promise<void>;
  isAnswered: boolean;
}

/** An acknowledgement that was answered. */
interface Kept {
  readonly partition: PartitionKeys;
  readonly call: Call;
}

/** Takes note of an acknowledgement that was answered. */
type Keep = (partition: PartitionKeys, call: Call) => void;

/**
 * Sends scripts that may run twice to one server, without waiting for each answer. An answered one is kept until a replica
 * has it, because a replica that takes over may lack it.
 */
class Outbox {
  readonly #run: RunScript;
  /** Returns whether others wait for other servers. */
  readonly #isOneOfMany: () => boolean;
  readonly #answered: Keep;
  /** What was sent from the oldest one without an answer on, in order. */
  readonly #sent: Sent[] = [];
  /** The newest ones that were answered and are not known to be on a replica. */
  #kept: Kept[] = [];
  #watch: RunWatch;
  #probe: ReplicaProbe;
  #timer: NodeJS.Timeout | null = null;
  #looks: Promise<void> = Promise.resolve();
  #isClosed = false;
  #failure: Error | null = null;
  /** Whether the server has given no answer since it was last waited for. */
  #isLate = false;

  /** @param answered Gives what was answered to the outbox that keeps it by then. */
  constructor(run: RunScript, isOneOfMany: () => boolean, watch: RunWatch, probe: ReplicaProbe, answered: Keep) {
    this.#run = run;
    this.#isOneOfMany = isOneOfMany;
    this.#watch = watch;
    this.#probe = probe;
    this.#answered = answered;
  }

  /** See `Outboxes.send`. */
  send(partition: PartitionKeys, call: Call): Promise<void> {
    const answer = this.#run(...call).then((reply) => {
      if (Number(reply) >= 0) this.#answered(partition, call); // else the epoch has ended, and nothing is acknowledged
    });
    const sent: Sent = { answer, isAnswered: false };
    this.#sent.push(sent);
    const done = () => {
      sent.isAnswered = true;
      this.#isLate = false;
      while (this.#sent[0]?.isAnswered) this.#sent.shift();
    };
    answer.then(done, (error) => {
      this.#failure ??= error;
      done();
    });
    return answer;
  }

  /** Keep what was answered. */
  keep(...kept: Kept[]): void {
    this.#kept.push(...kept);
    if (this.#kept.length > KEPT) this.#kept.splice(0, this.#kept.length - KEPT);
    this.#lookLater();
  }

  /** Leave what is kept of some partitions to another outbox. */
  leave(partitions: readonly PartitionKeys[], other: Outbox, watch: RunWatch, probe: ReplicaProbe): void {
    other.keep(...this.#kept.filter(({ partition }) => partitions.includes(partition)));
    this.#kept = this.#kept.filter(({ partition }) => !partitions.includes(partition));
    [this.#watch, this.#probe] = [watch, probe];
  }

  /** Look again and again, as long as something is kept. */
  #lookLater(): void {
    if (this.#timer !== null || this.#isClosed || this.#kept.length === 0) return;
    this.#timer = setTimeout(async () => {
      await this.look(ASK_MS).catch(() => {}); // one that is away is asked later
      this.#timer = null;
      this.#lookLater();
    }, LOOK_EVERY_MS).unref();
  }

  /** Send again what an older server may have lost, and forget what replicas have. Raises ServerUnavailable. */
  look(limitMs: number): Promise<void> {
    const looked = this.#looks.then(() => this.#look(limitMs));
    this.#looks = looked.catch(() => {});
    return looked;
  }

  async #look(limitMs: number): Promise<void> {
    const newest = this.#kept.at(-1);
    if (newest === undefined) return;
    const isConfirmed = await this.#probe.isConfirmed(limitMs).catch(() => false); // also without the right to ask
    // asked last: another server may have answered
    const isAnother = await this.#watch.isAnother(async () => {
      for (const { partition, call } of this.#kept.splice(0)) void this.send(partition, call).catch(() => {});
    });
    if (isConfirmed && !isAnother) this.#kept.splice(0, this.#kept.indexOf(newest) + 1);
  }

  /** Send nothing of what was answered again. */
  forget(): void {
    this.#kept = [];
  }

  close(): void {
    this.#isClosed = true;
    if (this.#timer !== null) clearTimeout(this.#timer);
  }

  /**
   * Return once fewer than `UNANSWERED` were sent since the oldest one without an answer. One server of many is waited
   * for briefly, and then no more until it answers: it holds up its own acknowledgements only. What it has to
   * acknowledge is bounded, because nothing more is read from it.
   */
  async hasRoom(): Promise<void> {
    while (this.#sent.length >= UNANSWERED && !this.#isLate) {
      const answered = (this.#sent[0] as Sent).answer.catch(() => {});
      if (!this.#isOneOfMany()) await answered;
      else if ((await within(answered, ELSEWHERE_MS)) === LATE) this.#isLate = true;
    }
  }

  get isEmpty(): boolean {
    return this.#sent.length === 0;
  }

  async settled(): Promise<void> {
    await Promise.allSettled(this.#sent.map(({ answer }) => answer));
  }

  /** Return, once, why something failed. */
  takeFailure(): Error | null {
    const failure = this.#failure;
    this.#failure = null;
    return failure;
  }
}

/** The acknowledgements of one member, with an outbox for each server. */
export class Outboxes {
  readonly #run: RunScript;
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #boxes: Outbox[] = [];
  readonly #watches = new Map<Outbox, RunWatch>();
  readonly #ofPartitions = new Map<PartitionKeys, Outbox>();

  /**
   * @param run Runs a script, and repeats what a lost connection did not answer.
   * @param server Its failures are not waited for.
   * @param servers The partitions of each server.
   */
  constructor(run: RunScript, server: Server, stream: Stream, servers: readonly (readonly PartitionKeys[])[]) {
    this.#run = run;
    this.#server = server;
    this.#stream = stream;
    for (const partitions of servers) this.#add(partitions, new RunWatch(server, rostersOf(partitions)));
  }

  #add(partitions: readonly PartitionKeys[], watch: RunWatch): Outbox {
    const isOneOfMany = () => this.#boxes.length > 1;
    const keep: Keep = (partition, call) => this.#of(partition).keep({ partition, call });
    const box = new Outbox(this.#run, isOneOfMany, watch, this.#probeOf(partitions), keep);
    this.#boxes.push(box);
    this.#watches.set(box, watch);
    for (const partition of partitions) this.#ofPartitions.set(partition, box);
    return box;
  }

  #probeOf(partitions: readonly PartitionKeys[]): ReplicaProbe {
    return new ReplicaProbe(this.#server, this.#stream, partitions);
  }

  /** Give partitions that moved to another server an outbox of their own. */
  split(partitions: readonly PartitionKeys[]): void {
    const old = this.#of(partitions[0] as PartitionKeys);
    const left = [...this.#ofPartitions].filter(([one, box]) => box === old && !partitions.includes(one));
    const [own, watch] = [left.map(([one]) => one), this.#watches.get(old) as RunWatch];
    const ownWatch = watch.of(rostersOf(own));
    this.#watches.set(old, ownWatch);
    old.leave(partitions, this.#add(partitions, watch.of(rostersOf(partitions))), ownWatch, this.#probeOf(own));
  }

  /** Send a script of a partition. Returns its answer, which need not be awaited: a later call raises its failure. */
  send(partition: PartitionKeys, ...call: Call): Promise<void> {
    return this.#of(partition).send(partition, call);
  }

  /** Return once more may be sent to these partitions. Raises what failed. */
  async hasRoom(partitions: Iterable<PartitionKeys>): Promise<void> {
    for (const box of new Set([...partitions].map((one) => this.#of(one)))) await box.hasRoom();
    this.#raise();
  }

  /** Return whether every acknowledgement was answered. */
  get isEmpty(): boolean {
    return this.#boxes.every(({ isEmpty }) => isEmpty);
  }

  /** Return once every acknowledgement is on its server. Raises what failed. */
  async flush(): Promise<void> {
    await Promise.all(this.#boxes.map((box) => box.settled()));
    this.#raise();
  }

  /** Learn which servers there are, before anything is sent. Raises ServerUnavailable. */
  async learn(): Promise<void> {
    await Promise.all([...this.#watches.values()].map((watch) => watch.isAnother()));
  }

  /** Return once the servers of these partitions have again what older ones may have lost. Raises ServerUnavailable. */
  async attend(partitions: Iterable<PartitionKeys>): Promise<void> {
    for (const box of new Set([...partitions].map((one) => this.#of(one)))) {
      await box.look(ASK_MS);
      await box.settled();
    }
  }

  /** Flush, and wait for a limited time until a replica of each server has everything. Raises what failed. */
  async confirm(): Promise<void> {
    await this.flush();
    const looked = this.#boxes.map((box) => box.look(CONFIRM_MS).catch(() => {}));
    await Promise.all(looked.map((one) => within(one, 2 * CONFIRM_MS)));
    await this.flush();
  }

  /** Send nothing of what was answered again, because what it says is taken back. */
  forget(): void {
    for (const box of this.#boxes) box.forget();
  }

  /** Look no more at what was answered. */
  close(): void {
    for (const box of this.#boxes) box.close();
  }

  #of(partition: PartitionKeys): Outbox {
    return this.#ofPartitions.get(partition) as Outbox;
  }

  #raise(): void {
    for (const box of this.#boxes) {
      const failure = box.takeFailure();
      if (failure !== null) throw failure;
    }
  }
}

function rostersOf(partitions: readonly PartitionKeys[]): string[] {
  return partitions.map(({ roster }) => roster);
}
