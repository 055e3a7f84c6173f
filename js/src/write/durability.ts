import { BadOption, PenstockError, ReplyError, ServerUnsuitable } from "../errors.js";
import { loadScript } from "../scripts.js";
import type { Argument, Server } from "../server/server.js";
import { countReplicas } from "../stream/replicas.js";
import type { Stream } from "../stream/stream.js";
import { type Notify, Wait } from "../waiting.js";

/** The longest time that the server may take for one answer. A shortfall is reported, and the server is asked again. */
const ROUND_MS = 1000;
const LEVEL = /^(?:memory|(fsync)?(?:(?:(?<=c)\+|^)replicas=([1-9]\d{0,2}))?)$/;
const TOUCH = loadScript("touch");

/** What must have happened to a write before it counts as committed. */
export class Durability {
  readonly text: string;
  readonly #isSynced: boolean;
  readonly #replicas: number;

  /** @param text `memory`, `fsync`, `replicas=2` or `fsync+replicas=2`. Raises BadOption. */
  constructor(text: string) {
    const found = LEVEL.exec(text);
    if (text === "" || found === null) {
      throw new BadOption(`durability is '${text}', expected one of memory, fsync, replicas=K, fsync+replicas=K`);
    }
    this.text = text;
    this.#isSynced = found[1] !== undefined;
    this.#replicas = Number(found[2] ?? 0);
  }

  /** Return the commands to send behind a write on its connection. `shortfall` takes as many answers. */
  get commands(): Argument[][] {
    const wait: Argument[][] = this.#isSynced ? [["WAITAOF", 1, 0, ROUND_MS]] : [];
    if (this.#replicas > 0) wait.push(["WAIT", this.#replicas, ROUND_MS]);
    return wait;
  }

  /** Return what is missing, by the answers to `commands`, or "". Raises what the server refused. */
  shortfall(replies: readonly unknown[]): string {
    const refused = replies.find((reply) => reply instanceof Error);
    if (refused !== undefined) throw refused;
    const answers = [...replies];
    const missing: string[] = [];
    if (this.#isSynced && Number((answers.shift() as unknown[])[0]) === 0) {
      missing.push("the server has not written it to its disk");
    }
    if (this.#replicas > 0 && Number(answers[0]) < this.#replicas) {
      missing.push(`${answers[0]} of ${this.#replicas} replicas have it`);
    }
    return missing.join(" and ");
  }

  /**
   * Raise ServerUnsuitable if the server cannot keep the level.
   *
   * @param isStored Whether the stream has the level already. Its writers wait for replicas, which are few after a failover.
   */
  async require(server: Server, isStored: boolean): Promise<void> {
    const start = `durability '${this.text}' cannot be kept by this server`;
    if (this.#isSynced) {
      const [answer] = await server.sequence([["WAITAOF", 1, 0, 1]]);
      if (answer instanceof PenstockError && !(answer instanceof ReplyError)) throw answer;
      if (answer instanceof Error)
        throw new ServerUnsuitable(`${start} (${answer.message}): choose memory or replicas=K`);
    }
    if (this.#replicas === 0 || isStored) return;
    const online = Math.min(...(await server.onEach((one) => countReplicas(one))));
    if (online < this.#replicas) {
      throw new ServerUnsuitable(
        `durability '${this.text}' needs ${this.#replicas} replicas, the server has ${online} that follow: connect ` +
          "replicas, or choose a lower level",
      );
    }
  }

  /** Return once everything written so far is as safe as the level demands. It waits without end, and says so. */
  async makeSafe(server: Server, stream: Stream, notify: Notify): Promise<void> {
    if (this.commands.length === 0) return;
    const wait = new Wait(notify, null);
    for (;;) {
      const lacking = await this.#lacking(server, stream);
      if (lacking === "") return;
      await this.bear(wait, lacking);
    }
  }

  /** Return what is missing on the servers of the stream and of its partitions, which may be one. */
  async #lacking(server: Server, stream: Stream): Promise<string> {
    // a connection that has written nothing would get no answer
    const keys = [...stream.partitions.map(({ roster }) => roster), stream.keys.meta];
    const touches = new Map(keys.map((key): [string, Argument[]] => [server.placeOf(key), ["EVAL", TOUCH, 1, key]]));
    const answers = await Promise.all([...touches.values()].map((touch) => server.sequence([touch, ...this.commands])));
    return answers
      .map((one) => this.shortfall(one.slice(1)))
      .filter((text) => text !== "")
      .join(" and ");
  }

  /** Say what a write waits for, if a line is due. */
  async bear(wait: Wait, lacking: string): Promise<void> {
    await wait.because("durability", () => `durability '${this.text}': ${lacking}`);
  }
}
