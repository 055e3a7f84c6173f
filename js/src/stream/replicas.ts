import { loadScript } from "../scripts.js";
import { type Server, textOf } from "../server/server.js";
import type { PartitionKeys } from "./keys.js";
import type { Stream } from "./stream.js";

const TOUCH = loadScript("touch");

/** Return how many replicas follow the server of a key, or one of the servers. */
export async function countReplicas(server: Server, key?: string): Promise<number> {
  const asked = key === undefined ? server.call("INFO", "replication") : server.callAt(key, "INFO", "replication");
  return (textOf(await asked) ?? "").match(/^slave\d+:.*state=online/gm)?.length ?? 0;
}

/** The question whether replicas have what was written to one server, as the stream's durability demands. */
export class ReplicaProbe {
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #rosters: readonly string[];

  /** @param partitions Those on the server. */
  constructor(server: Server, stream: Stream, partitions: readonly PartitionKeys[]) {
    this.#server = server;
    this.#stream = stream;
    this.#rosters = partitions.map(({ roster }) => roster);
  }

  /** Return whether all that was written before is on replicas. False where none is asked for. */
  async isConfirmed(limitMs: number): Promise<boolean> {
    const [roster] = this.#rosters as [string];
    const isOne = this.#server.byServer(this.#rosters).length === 1; // one WAIT cannot answer for several servers
    const replicas = isOne ? await this.#wanted(roster) : 0;
    if (replicas === 0) return false;
    const wait = ["WAIT", replicas, limitMs];
    const [touched, count] = await this.#server.sequence([["EVAL", TOUCH, 1, roster], wait]);
    return Number(touched) === 1 && Number(count) >= replicas;
  }

  async #wanted(roster: string): Promise<number> {
    const { durability, isAuto } = this.#stream;
    if (isAuto) return Math.min(1, await countReplicas(this.#server, roster));
    return Number(/replicas=(\d+)/.exec(durability)?.[1] ?? 0);
  }
}
