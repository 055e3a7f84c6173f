// Asks whether replicas have what was written, as the stream's durability demands, and writes facts again after a
// failover.

import { PenstockError, ServerUnavailable } from "../errors.js";
import type { Server } from "../server/client.js";
import { type Notify, Wait } from "../waiting.js";
import { Durability, ReplicaWatch, touchCommand, unconfirmedNotice } from "./durability.js";
import type { PartitionKeys } from "./keys.js";
import type { Stream } from "./stream.js";

/**
 * Asks the servers of one stream whether replicas have what was written, as the stream's durability demands. It asks
 * nothing where the level is `memory`, where it is `auto` and no replica follows the server, or without the right to WAIT.
 */
export class Confirmer {
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #notify: Notify;
  readonly #isClosed: () => boolean;
  readonly #watch: ReplicaWatch;
  readonly #durability: Durability;

  /**
   * @param server Its failures are not waited for.
   * @param isClosed Ends a wait that has no end of its own.
   */
  constructor(
    server: Server,
    stream: Stream,
    notify: Notify,
    {
      isClosed = () => false,
      watch = new ReplicaWatch(server),
    }: { isClosed?: () => boolean; watch?: ReplicaWatch } = {},
  ) {
    this.#server = server;
    this.#stream = stream;
    this.#notify = notify;
    this.#isClosed = isClosed;
    this.#watch = watch;
    this.#durability = new Durability(stream.durability);
  }

  /**
   * Write facts, and return the answer once replicas have them. They are written again after each failover. With `auto`
   * the wait has a limit of its own.
   *
   * @param keys A key of each server that is written to.
   */
  async run<T>(keys: readonly string[], write: () => Promise<T>, limitMs = Number.POSITIVE_INFINITY): Promise<T> {
    const wait = new Wait(this.#notify, null);
    for (;;) {
      const servers = await this.#asked(keys);
      const answer = await write();
      const lacking = new Map<string, string>();
      for (const [place, key] of servers) {
        const lack = await this.#lackingAt(place, key);
        if (lack !== "") lacking.set(key, lack);
      }
      if (lacking.size === 0 || wait.ms >= limitMs) return answer;
      if (this.#isClosed()) throw new PenstockError(`closed while what '${this.#stream.name}' was told had no replica`);
      if (await this.#durability.bear(wait, [...new Set(lacking.values())].join(" and "))) continue;
      for (const key of lacking.keys()) {
        this.#watch.lost(key);
        this.#notify(unconfirmedNotice(this.#stream.name, this.#server.whereIs(key)));
      }
      return answer;
    }
  }

  /** Return a key of each server, if any of them is to be asked. */
  async #asked(keys: readonly string[]): Promise<Map<string, string>> {
    let isAsked = false;
    for (const key of keys) isAsked ||= !(await this.#watch.level(this.#durability, key)).isNothing;
    return new Map(isAsked ? keys.map((key) => [this.#server.placeOf(key), key]) : []);
  }

  /** Return what the replicas of a server lack, or "". */
  async #lackingAt(place: string, key: string): Promise<string> {
    const level = await this.#watch.level(this.#durability, key);
    if (this.#server.placeOf(key) !== place) return this.#moved(place, key);
    if (level.isNothing) return "";
    const [touched, ...replies] = await this.#server.sequence([touchCommand(key), ...level.commands()]);
    const failure = [touched, ...replies].find((one) => one instanceof Error);
    if (failure instanceof ServerUnavailable) return failure.message;
    if (touched instanceof Error) return touched.message;
    if (this.#server.placeOf(key) !== place) return this.#moved(place, key); // a new connection led to another one
    return failure === undefined ? level.shortfall(replies) : ""; // without the right to WAIT nothing is asked
  }

  #moved(place: string, key: string): string {
    return `the keys have moved from ${place} to ${this.#server.placeOf(key)}`;
  }
}

/** The question whether replicas have what was written to one server, as the stream's durability demands. */
export class ReplicaProbe {
  readonly #server: Server;
  readonly #durability: Durability;
  readonly #watch: ReplicaWatch;
  readonly #rosters: readonly string[];

  /** @param partitions Those on the server. */
  constructor(server: Server, stream: Stream, partitions: readonly PartitionKeys[]) {
    this.#server = server;
    this.#durability = new Durability(stream.durability);
    this.#watch = new ReplicaWatch(server);
    this.#rosters = partitions.map(({ roster }) => roster);
  }

  /** Return whether all that was written before is on replicas. False where none is asked for. */
  async isConfirmed(limitMs: number): Promise<boolean> {
    const [roster] = this.#rosters as [string];
    if (this.#server.byServer(this.#rosters).length > 1) return false; // one WAIT cannot answer for several servers
    const level = await this.#watch.level(this.#durability, roster);
    if (level.replicas === 0) return false;
    const wait = ["WAIT", level.replicas, limitMs];
    const [touched, count] = await this.#server.sequence([touchCommand(roster), wait]);
    return Number(touched) === 1 && Number(count) >= level.replicas;
  }
}
