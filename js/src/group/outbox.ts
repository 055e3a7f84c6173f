import type { Argument, Server } from "../server/server.js";
import type { PartitionKeys } from "../stream/keys.js";
import { ReplicaProbe } from "../stream/replicas.js";
import { RunWatch } from "../stream/serverRuns.js";
import type { Stream } from "../stream/stream.js";
import { ELSEWHERE_MS, LATE, within } from "./aside.js";

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

/**
 * Sends scripts that may run twice to one server, without waiting for each answer. An answered one is kept until a replica
 * has it, because a replica that takes over may lack it.
 */
class Outbox {
  readonly #run: RunScript;
  /** Whether others wait for other servers. */
  readonly #isOneOfMany: boolean;
  /** What was sent from the oldest one without an answer on, in order. */
  readonly #sent: Sent[] = [];
  /** The newest ones that were answered and are not known to be on a replica. */
  #kept: Call[] = [];
  readonly #watch: RunWatch;
  readonly #probe: ReplicaProbe;
  #timer: NodeJS.Timeout | null = null;
  #looks: Promise<void> = Promise.resolve();
  #isClosed = false;
  #failure: Error | null = null;
  /** Whether the server has given no answer since it was last waited for. */
  #isLate = false;

  constructor(run: RunScript, isOneOfMany: boolean, watch: RunWatch, probe: ReplicaProbe) {
    this.#run = run;
    this.#isOneOfMany = isOneOfMany;
    this.#watch = watch;
    this.#probe = probe;
  }

  /** See `Outboxes.send`. */
  send(...call: Call): Promise<void> {
    const answer = this.#run(...call).then((reply) => {
      if (Number(reply) >= 0) this.#keep(call); // else the epoch has ended, and nothing of it is acknowledged any more
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

  #keep(call: Call): void {
    this.#kept.push(call);
    if (this.#kept.length > KEPT) this.#kept.shift();
    this.#lookLater();
  }

  /** Look again and again, as long as something is kept. */
  #lookLater(): void {
    if (this.#timer !== null || this.#isClosed || this.#kept.length === 0) return;
    this.#timer = setTimeout(async () => {
      await this.look(ASK_MS);
      this.#timer = null;
      this.#lookLater();
    }, LOOK_EVERY_MS).unref();
  }

  /** Send again what an older server may have lost, and forget what replicas have. One that is away is asked later. */
  look(limitMs: number): Promise<void> {
    this.#looks = this.#looks.then(() => this.#look(limitMs)).catch(() => {});
    return this.#looks;
  }

  async #look(limitMs: number): Promise<void> {
    const newest = this.#kept.at(-1);
    if (newest === undefined) return;
    const isConfirmed = await this.#probe.isConfirmed(limitMs).catch(() => false); // also without the right to ask
    // asked last: another server may have answered
    if (await this.#watch.isAnother()) for (const call of this.#kept.splice(0)) void this.send(...call).catch(() => {});
    else if (isConfirmed) this.#kept.splice(0, this.#kept.indexOf(newest) + 1);
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
      if (!this.#isOneOfMany) await answered;
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
  readonly #boxes: readonly Outbox[];
  readonly #watches: readonly RunWatch[];
  readonly #ofPartitions: ReadonlyMap<PartitionKeys, Outbox>;

  /**
   * @param run Runs a script, and repeats what a lost connection did not answer.
   * @param server Its failures are not waited for.
   * @param servers The partitions of each server.
   */
  constructor(run: RunScript, server: Server, stream: Stream, servers: readonly (readonly PartitionKeys[])[]) {
    this.#watches = servers.map(
      (some) =>
        new RunWatch(
          server,
          some.map(({ roster }) => roster),
        ),
    );
    this.#boxes = servers.map((partitions, at) => {
      const probe = new ReplicaProbe(server, stream, partitions);
      return new Outbox(run, servers.length > 1, this.#watches[at] as RunWatch, probe);
    });
    this.#ofPartitions = new Map(
      servers.flatMap((partitions, at) => partitions.map((one) => [one, this.#boxes[at] as Outbox] as const)),
    );
  }

  /** Send a script of a partition. Returns its answer, which need not be awaited: a later call raises its failure. */
  send(partition: PartitionKeys, ...call: Call): Promise<void> {
    return this.#of(partition).send(...call);
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
    await Promise.all(this.#watches.map((watch) => watch.isAnother()));
  }

  /** Return once the servers of these partitions have again what older ones may have lost. */
  async attend(partitions: Iterable<PartitionKeys>): Promise<void> {
    for (const box of new Set([...partitions].map((one) => this.#of(one)))) {
      await box.look(ASK_MS);
      await box.settled();
    }
  }

  /** Flush, and wait for a limited time until a replica of each server has everything. Raises what failed. */
  async confirm(): Promise<void> {
    await this.flush();
    await Promise.all(this.#boxes.map((box) => within(box.look(CONFIRM_MS), 2 * CONFIRM_MS)));
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
