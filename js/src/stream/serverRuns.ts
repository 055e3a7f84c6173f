// The runs of servers (`run_id`): whether a server was restarted or replaced since a look or a join, and may lack its
// newest writes.

import { setTimeout as sleep } from "node:timers/promises";
import { type PenstockError, ReplyError, ServerUnavailable, Unauthorized } from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { now } from "../waiting.js";
import type { PartitionKeys } from "./keys.js";
import type { Stream } from "./stream.js";

/** Return the id of the present run of a key's server, or null if this user may not ask for it. */
async function readRun(server: Server, key: string): Promise<string | null> {
  try {
    return /^run_id:(\w+)/m.exec(textOf(await server.callAt(key, "INFO", "server")) ?? "")?.[1] ?? null;
  } catch (error) {
    if (error instanceof Unauthorized || error instanceof ReplyError) return null;
    throw error;
  }
}

/** The time in which each server must answer, so that a silent one holds nobody up. */
const ANSWER_MS = 2000;

/** Facts of a server's INFO. */
interface Facts {
  readonly role?: string;
  readonly run_id?: string;
  readonly second_repl_offset?: string;
  readonly uptime_in_seconds?: string;
}

/** The server of a key at a look. */
interface Sighting {
  readonly place: string;
  readonly run: string | null;
  /** The places of all servers that held keys then. */
  readonly holders: readonly string[];
}

/**
 * Notices that the server of some keys may lack its newest writes, because it was restarted or replaced. A key that moved
 * to another server took everything along, and is not such a key.
 */
export class RunWatch {
  readonly #server: Server;
  readonly #keys: readonly string[];
  /** The connections when the runs were last asked for. */
  #made: number | null = null;
  /** The server of each key at that time, or nothing before the first call. */
  #seen: readonly Sighting[] = [];
  /** When the keys were looked at last. */
  #at = 0;

  constructor(server: Server, keys: readonly string[]) {
    this.#server = server;
    this.#keys = keys;
  }

  /** Return the watch of some of the keys, which knows what this one knows. */
  of(keys: readonly string[]): RunWatch {
    const watch = new RunWatch(this.#server, keys);
    const seen = keys.map((key) => this.#seen[this.#keys.indexOf(key)]);
    watch.#seen = seen.filter((one) => one !== undefined);
    [watch.#made, watch.#at] = [this.#made, this.#at];
    return watch;
  }

  /**
   * Return whether a server may lack writes that it had at the last call. Then `act` is called first, and if it fails, the
   * next call calls it again. The first call only learns the runs. It costs nothing while no connection was made and no
   * key moved. Where the run is hidden, each new connection and each move counts.
   *
   * @throws ServerUnavailable.
   */
  async isAnother(act: () => Promise<void> = async () => {}): Promise<boolean> {
    const [{ made, holders }, places] = [this.#server, this.#keys.map((key) => this.#server.placeOf(key))];
    const [at, before, looked] = [this.#at, this.#seen, now()];
    const isSame = before.length > 0 && places.every((place, number) => place === before[number]?.place);
    if (isSame && made !== null && made === this.#made) {
      this.#at = looked;
      return false;
    }
    const runs = new Map<string, string | null>();
    for (const [number, place] of places.entries()) {
      if (!runs.has(place)) runs.set(place, await readRun(this.#server, this.#keys[number] as string));
    }
    const found = places.map((place): Sighting => ({ place, run: runs.get(place) ?? null, holders }));
    const mayLack = await Promise.all(before.map((one, number) => this.#mayLack(one, found[number] as Sighting, at)));
    const isAnother = mayLack.includes(true);
    if (isAnother) await act();
    // not before: a failure, or a copy that `of` makes meanwhile, must not take the new server for known
    [this.#made, this.#seen, this.#at] = [made, found, looked];
    return isAnother;
  }

  async #mayLack(before: Sighting, found: Sighting, at: number): Promise<boolean> {
    if (found.run === null || before.run === null) return this.#server.made !== null;
    if (found.place === before.place) return found.run !== before.run;
    return !(await this.#movedWhole(before, found, at));
  }

  /**
   * Return whether a key moved from one server to another, and neither was replaced or restarted since the last look.
   * Nor may a server that had it in between have failed over, which would have left fewer of the holders.
   */
  async #movedWhole(before: Sighting, found: Sighting, at: number): Promise<boolean> {
    if (!before.holders.every((place) => found.holders.includes(place))) return false;
    const [old, next] = await Promise.all([this.#told(before.place), this.#told(found.place)]);
    if (old.role !== "master" || next.role !== "master") return false;
    if (old.run_id !== before.run || next.run_id !== found.run) return false;
    // a replica that took over was no holder before
    const wasMaster = before.holders.includes(found.place) || next.second_repl_offset === "-1";
    return wasMaster && Number(next.uptime_in_seconds) * 1000 > now() - at;
  }

  /** Return the facts of a server's INFO, or nothing if it does not answer in time. */
  async #told(place: string): Promise<Facts> {
    const asked = this.#server.infoOf(place).catch(() => null);
    const info = await Promise.race([asked, sleep(ANSWER_MS, null, { ref: false })]);
    return Object.fromEntries([...(info ?? "").matchAll(/^(\w+):(.*?)\r?$/gm)].map(([, name, value]) => [name, value]));
  }
}

/**
 * The run of each server of a member at its join. A server that came back older may have lost the member. Its error then
 * names that server.
 */
export class ServerRuns {
  readonly #server: Server;
  readonly #stream: Stream;
  /** Partition to the run of its server at the join. */
  readonly #ids = new Map<PartitionKeys, string | null>();

  /** @param server Its failures are not waited for. */
  constructor(server: Server, stream: Stream) {
    this.#server = server;
    this.#stream = stream;
  }

  /** Remember the runs of now. Raises ServerUnavailable. */
  async learn(): Promise<void> {
    const { partitions } = this.#stream;
    for (const numbers of this.#server.byServer(partitions.map(({ roster }) => roster))) {
      const some = numbers.map((number) => partitions[number] as PartitionKeys);
      const run = await readRun(this.#server, (some[0] as PartitionKeys).roster);
      for (const partition of some) this.#ids.set(partition, run);
    }
  }

  /** Return whether the server of a partition was restarted or replaced since the join. Raises ServerUnavailable. */
  async isReplaced(partition: PartitionKeys, server = this.#server): Promise<boolean> {
    const joined = this.#ids.get(partition) ?? null;
    const run = joined === null ? null : await readRun(server, partition.roster);
    return run !== null && run !== joined;
  }

  /** Return whether this is so for every partition of the stream. */
  async areAllReplaced(server: Server): Promise<boolean> {
    for (const partition of this.#stream.partitions) if (!(await this.isReplaced(partition, server))) return false;
    return true;
  }

  /** Return an error of a partition, with server and time if the server was restarted or replaced since the join. */
  async explained<E extends PenstockError>(error: E, partition: PartitionKeys): Promise<E> {
    try {
      if (!(await this.isReplaced(partition))) return error;
    } catch (worse) {
      if (worse instanceof ServerUnavailable) return error;
      throw worse;
    }
    const at = new Date().toISOString().slice(0, 19).replace("T", " ");
    return new (error.constructor as new (message: string) => E)(
      `${error.message}. The server ${this.#server.whereIs(partition.roster)}, which has partition ` +
        `${partition.number} of '${this.#stream.name}', was restarted or replaced since this process joined (noticed ` +
        `at ${at} UTC), and may have lost its newest writes`,
    );
  }
}
