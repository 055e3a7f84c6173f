import type { Argument, Server } from "../server/server.js";

/** Acknowledgements under way at once. Those that a crash of the server loses are delivered again. */
const UNANSWERED = 8;

/** Sends scripts that may run twice, without waiting for each answer. */
export class Outbox {
  readonly #server: Server;
  readonly #pending = new Set<Promise<void>>();
  #failure: Error | null = null;
  readonly #explain: (error: Error) => Error;

  /**
   * @param server Repeats what a lost connection did not answer.
   * @param explain Returns the error that a refusal means.
   */
  constructor(server: Server, explain: (error: Error) => Error = (error) => error) {
    this.#server = server;
    this.#explain = explain;
  }

  /** Send a script. Returns its answer, which need not be awaited: a later call raises its failure. */
  send(script: string, keys: readonly string[], args: readonly Argument[]): Promise<void> {
    const sent = this.#server.run(script, keys, args).then(
      () => {},
      (error) => {
        throw this.#explain(error);
      },
    );
    this.#pending.add(sent);
    sent.catch((error) => {
      this.#failure ??= error;
    });
    const done = () => this.#pending.delete(sent);
    sent.then(done, done);
    return sent;
  }

  /** Return once few enough are under way. Raises what failed. */
  async hasRoom(): Promise<void> {
    while (this.#pending.size >= UNANSWERED) await Promise.race([...this.#pending].map((one) => one.catch(() => {})));
    this.#raise();
  }

  /** Return whether every acknowledgement was answered. */
  get isEmpty(): boolean {
    return this.#pending.size === 0;
  }

  /** Return once every acknowledgement is on the server. Raises what failed. */
  async flush(): Promise<void> {
    await Promise.allSettled(this.#pending);
    this.#raise();
  }

  #raise(): void {
    const failure = this.#failure;
    this.#failure = null;
    if (failure !== null) throw failure;
  }
}
