// The connection for commands that wait at the server (`BLOCK`), because such a command holds up all others on its
// connection.

import { setTimeout as sleep } from "node:timers/promises";
import type { Argument, Server } from "../server/client.js";

/** The pause of a client that cannot block, because others share its connection. */
const POLL_MS = 25;

/** A connection for commands that wait at the server, which would hold up all others. */
export class BlockingConnection {
  readonly #server: Server;
  readonly #isShared: boolean;

  private constructor(server: Server, isShared: boolean) {
    this.#server = server;
    this.#isShared = isShared;
  }

  /** Connect. A client that cannot be duplicated is used as it is, without waiting at the server. */
  static async open(control: Server): Promise<BlockingConnection> {
    const server = await control.another();
    return server === null ? new BlockingConnection(control, true) : new BlockingConnection(server, false);
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
    if (!this.#isShared) this.#server.close();
  }
}
