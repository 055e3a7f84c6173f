import { setTimeout as sleep } from "node:timers/promises";
import { type Argument, type RedisLike, Server, type ServerOptions } from "../server/server.js";

/** The pause of a client that cannot block, because others share its connection. */
const POLL_MS = 25;

/** What clients of Redis offer to make another connection. */
interface Duplicating extends RedisLike {
  duplicate?(): RedisLike & { connect?(): Promise<unknown>; on?(event: "error", listener: () => void): unknown };
}

interface Closing {
  destroy?(): unknown;
  disconnect?(): unknown;
}

/** A connection for commands that wait at the server, which would hold up all others. */
export class BlockingLine {
  readonly #server: Server;
  readonly #close: () => void;
  readonly #isShared: boolean;

  private constructor(server: Server, close: () => void, isShared: boolean) {
    this.#server = server;
    this.#close = close;
    this.#isShared = isShared;
  }

  /** Connect. A `client` that cannot be duplicated is used as it is, without waiting at the server. */
  static async open(options: ServerOptions, control: Server): Promise<BlockingLine> {
    if (options.client === undefined) {
      const server = await Server.open(options);
      return new BlockingLine(server, () => server.close(), false);
    }
    const copy = (options.client as Duplicating).duplicate?.();
    if (copy === undefined) return new BlockingLine(control, () => {}, true);
    copy.on?.("error", () => {}); // commands fail by themselves, and a listener must be there
    await copy.connect?.();
    const server = await Server.open({ client: copy });
    const { destroy, disconnect } = copy as Closing;
    return new BlockingLine(server, () => void (destroy ?? disconnect)?.call(copy), false);
  }

  get server(): Server {
    return this.#server;
  }

  /**
   * Send a command that may wait.
   *
   * @param blockMs The longest wait, or null for none.
   * @param before The words of the command before BLOCK.
   * @param after Its words behind it.
   * @returns The answer, or null after a wait for nothing.
   */
  async call(blockMs: number | null, before: readonly string[] | readonly Argument[], after: readonly Argument[]) {
    if (blockMs === null || this.#isShared) {
      const answer = await this.#server.call(...before, ...after);
      if (answer === null && blockMs !== null) await sleep(Math.min(blockMs, POLL_MS));
      return answer;
    }
    return await this.#server.call(...before, "BLOCK", Math.max(1, Math.round(blockMs)), ...after);
  }

  close(): void {
    this.#close();
  }
}
