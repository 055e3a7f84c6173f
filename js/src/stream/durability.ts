// Durability: the levels that a write must reach, the commands that ask for them, and which servers have a replica, for
// `auto`. WAIT and WAITAOF answer only for what their own connection wrote, and for everything written before it. So
// they follow a commit on its connection, or a hint that is written for them.

import { BadOption, PenstockError, ReplyError, ServerUnsuitable } from "../errors.js";
import { loadScript } from "../scripts.js";
import type { Argument, Server } from "../server/client.js";
import { textOf } from "../server/client.js";
import { now, seconds, type Wait } from "../waiting.js";

/** The longest time that the server may take for one answer. A shortfall is reported, and the server is asked again. */
const ROUND_MS = 1000;
/** The longest wait with the level `auto` for a replica that followed before. A failover takes less. */
const AUTO_MS = 10_000;
/** The time after which a server without a replica is asked again whether one follows. */
const LOOK_MS = 5000;
/** The time for which a server that took over may still get its first replica, and lose what it has to that one. */
const SUCCESSOR_MS = 30_000;
/** A replica that has not answered its primary for this many seconds does not count as following. */
const LAG_S = 5;
const LEVEL = /^(?:memory|(fsync)?(?:(?:(?<=c)\+|^)replicas=([1-9]\d{0,2}))?)$/;
const TOUCH = loadScript("touch");

/** The level of a stream of which one replica must have a write wherever one follows the server. */
export const AUTO = "auto";

/** What must have happened to a write before it counts as committed. */
export class Durability {
  readonly text: string;
  /** Whether one replica must have a write where a replica follows the server. See `on`. */
  readonly isAuto: boolean;
  readonly #isSynced: boolean;
  /** The number of replicas that must have a write. `auto` has none by itself. */
  readonly replicas: number;

  /** @param text `auto`, `memory`, `fsync`, `replicas=2` or `fsync+replicas=2`. Raises BadOption. */
  constructor(text: string) {
    const found = text === AUTO ? [] : LEVEL.exec(text);
    if (text === "" || found === null) {
      throw new BadOption(`durability is '${text}', expected one of auto, memory, fsync, replicas=K, fsync+replicas=K`);
    }
    this.text = text;
    this.isAuto = text === AUTO;
    this.#isSynced = found[1] !== undefined;
    this.replicas = Number(found[2] ?? 0);
  }

  /** Return the level on a server with or without a replica: `auto` is `replicas=1` there, or `memory`. */
  on(isFollowed: boolean): Durability {
    return this.isAuto ? new Durability(isFollowed ? "replicas=1" : "memory") : this;
  }

  /** Whether the level asks for nothing. `auto` asks for nothing by itself. */
  get isNothing(): boolean {
    return !this.#isSynced && this.replicas === 0;
  }

  /** Return the commands to send behind a write on its connection. `shortfall` takes as many answers. */
  commands(limitMs = ROUND_MS): Argument[][] {
    const wait: Argument[][] = this.#isSynced ? [["WAITAOF", 1, 0, limitMs]] : [];
    if (this.replicas > 0) wait.push(["WAIT", this.replicas, limitMs]);
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
    if (this.replicas > 0 && Number(answers[0]) < this.replicas) {
      missing.push(`${answers[0]} of ${this.replicas} replicas have it`);
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
    if (this.replicas === 0 || isStored) return;
    const online = Math.min(...(await server.onEach((one) => countReplicas(one))));
    if (online < this.replicas) {
      throw new ServerUnsuitable(
        `durability '${this.text}' needs ${this.replicas} replicas, the server has ${online} that follow: connect ` +
          "replicas, or choose a lower level",
      );
    }
  }

  /** Say why a write waits, if a line is due. Returns whether to wait on: with `auto` for a limited time. */
  async bear(wait: Wait, lacking: string): Promise<boolean> {
    if (this.isAuto && wait.ms >= AUTO_MS) return false;
    await wait.because("durability", () => `durability '${this.text}': ${lacking}`);
    return true;
  }
}

/** Return how many replicas follow the server of a key, or one of the servers. */
export async function countReplicas(server: Server, key?: string): Promise<number> {
  const asked = key === undefined ? server.call("INFO", "replication") : server.callAt(key, "INFO", "replication");
  const told = (textOf(await asked) ?? "").matchAll(/^slave\d+:.*state=online.*?(?:lag=(\d+)|$)/gm);
  return [...told].filter(([, lag]) => Number(lag ?? 0) <= LAG_S).length;
}

/** Return a harmless write to the server of a hash, for a connection that may have written nothing yet. */
export function touchCommand(key: string): Argument[] {
  return ["EVAL", TOUCH, 1, key];
}

/** Return the notice on a server whose replica does not answer any more, for the level `auto`. */
export function unconfirmedNotice(name: string, where: string): string {
  return (
    `no replica of ${where} has confirmed the newest writes to '${name}' for ${seconds(AUTO_MS)} s: they are in the ` +
    "memory of that server only, like all writes until a replica follows it again"
  );
}

/**
 * The servers that replicas follow, which decides what the level `auto` asks for. A server without a replica is asked
 * again every few seconds. One with a replica is not: its answers to WAIT show that the replica is gone.
 */
export class ReplicaWatch {
  readonly #server: Server;
  /** Server to whether a replica follows it, and to when that was asked. */
  readonly #followed = new Map<string, boolean>();
  readonly #lookedAt = new Map<string, number>();
  /** Key to its server at the last look, and to when that took over from another one. */
  readonly #servers = new Map<string, string>();
  readonly #tookOverAt = new Map<string, number>();
  /** The servers whose replica did not answer any more. It may still take their place. */
  readonly #givenUp = new Set<string>();

  /** @param server Its failures are not waited for. */
  constructor(server: Server) {
    this.#server = server;
  }

  /** Return the level that a write to a key must reach now. Only `auto` depends on the key's server. */
  async level(durability: Durability, key: string): Promise<Durability> {
    return durability.isAuto ? durability.on(await this.#isFollowed(key)) : durability;
  }

  /**
   * Return whether a replica that lacks the newest writes may take the place of the key's server: it took over a moment
   * ago, as the last `level` of the key found, or its replica was given up.
   */
  mayBeReplaced(key: string): boolean {
    const tookOver = now() - (this.#tookOverAt.get(key) ?? Number.NEGATIVE_INFINITY) < SUCCESSOR_MS;
    return tookOver || this.#givenUp.has(this.#servers.get(key) ?? "");
  }

  /** Note that a replica of the key's server did not answer in time: the server counts as one without. */
  lost(key: string): void {
    const place = this.#server.placeOf(key);
    this.#followed.set(place, false);
    this.#lookedAt.set(place, now());
    this.#givenUp.add(place);
  }

  async #isFollowed(key: string): Promise<boolean> {
    const place = this.#server.placeOf(key);
    const before = this.#servers.get(key) ?? place;
    this.#servers.set(key, place);
    if (before !== place) this.#tookOverAt.set(key, now());
    const isDue = now() - (this.#lookedAt.get(place) ?? Number.NEGATIVE_INFINITY) >= LOOK_MS;
    if (!this.#followed.get(place) && isDue) {
      this.#lookedAt.set(place, now());
      try {
        const isFollowed = (await countReplicas(this.#server, key)) > 0;
        const found = this.#server.placeOf(key); // a new connection may lead to another server
        this.#followed.set(found, isFollowed);
        if (isFollowed) this.#givenUp.delete(found);
      } catch (error) {
        // a server that is away, or does not say so, has none for now
        if (!(error instanceof PenstockError)) throw error;
      }
    }
    return this.#followed.get(this.#server.placeOf(key)) ?? false;
  }
}
