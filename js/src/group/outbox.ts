import type { Argument } from "../server/server.js";

/** Acknowledgements under way at once. Those that a crash of the server loses are delivered again. */
const UNANSWERED = 8;

/** Runs a script. */
export type RunScript = (script: string, keys: readonly string[], args: readonly Argument[]) => Promise<unknown>;

interface Sent {
  readonly answer: Promise<void>;
  isAnswered: boolean;
}

/** Sends scripts that may run twice, without waiting for each answer. */
export class Outbox {
  readonly #run: RunScript;
  /** What was sent from the oldest one without an answer on, in order. */
  readonly #sent: Sent[] = [];
  #failure: Error | null = null;

  /** @param run Runs a script, and repeats what a lost connection did not answer. */
  constructor(run: RunScript) {
    this.#run = run;
  }

  /** Send a script. Returns its answer, which need not be awaited: a later call raises its failure. */
  send(script: string, keys: readonly string[], args: readonly Argument[]): Promise<void> {
    const answer = this.#run(script, keys, args).then(() => {});
    const sent: Sent = { answer, isAnswered: false };
    this.#sent.push(sent);
    const done = () => {
      sent.isAnswered = true;
      while (this.#sent[0]?.isAnswered) this.#sent.shift();
    };
    answer.then(done, (error) => {
      this.#failure ??= error;
      done();
    });
    return answer;
  }

  /** Return once fewer than `UNANSWERED` were sent since the oldest one without an answer. Raises what failed. */
  async hasRoom(): Promise<void> {
    while (this.#sent.length >= UNANSWERED) await this.#sent[0]?.answer.catch(() => {});
    this.#raise();
  }

  /** Return whether every acknowledgement was answered. */
  get isEmpty(): boolean {
    return this.#sent.length === 0;
  }

  /** Return once every acknowledgement is on the server. Raises what failed. */
  async flush(): Promise<void> {
    await Promise.allSettled(this.#sent.map(({ answer }) => answer));
    this.#raise();
  }

  #raise(): void {
    const failure = this.#failure;
    this.#failure = null;
    if (failure !== null) throw failure;
  }
}
