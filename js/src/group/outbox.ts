import type { Argument } from "../server/server.js";
import type { PartitionKeys } from "../stream/keys.js";
import { ELSEWHERE_MS, LATE, within } from "./aside.js";

/** Acknowledgements under way at once. Those that a crash of the server loses are delivered again. */
const UNANSWERED = 8;

/** Runs a script. */
export type RunScript = (script: string, keys: readonly string[], args: readonly Argument[]) => Promise<unknown>;

interface Sent {
  readonly answer: Promise<void>;
  isAnswered: boolean;
}

/** Sends scripts that may run twice to one server, without waiting for each answer. */
class Outbox {
  readonly #run: RunScript;
  /** Whether others wait for other servers. */
  readonly #isOneOfMany: boolean;
  /** What was sent from the oldest one without an answer on, in order. */
  readonly #sent: Sent[] = [];
  #failure: Error | null = null;
  /** Whether the server has given no answer since it was last waited for. */
  #isLate = false;

  constructor(run: RunScript, isOneOfMany: boolean) {
    this.#run = run;
    this.#isOneOfMany = isOneOfMany;
  }

  /** See `Outboxes.send`. */
  send(script: string, keys: readonly string[], args: readonly Argument[]): Promise<void> {
    const answer = this.#run(script, keys, args).then(() => {});
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
  readonly #ofPartitions: ReadonlyMap<PartitionKeys, Outbox>;

  /**
   * @param run Runs a script, and repeats what a lost connection did not answer.
   * @param servers The partitions of each server.
   */
  constructor(run: RunScript, servers: readonly (readonly PartitionKeys[])[]) {
    this.#boxes = servers.map(() => new Outbox(run, servers.length > 1));
    this.#ofPartitions = new Map(
      servers.flatMap((partitions, at) => partitions.map((one) => [one, this.#boxes[at] as Outbox] as const)),
    );
  }

  /** Send a script of a partition. Returns its answer, which need not be awaited: a later call raises its failure. */
  send(partition: PartitionKeys, ...call: Parameters<RunScript>): Promise<void> {
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
