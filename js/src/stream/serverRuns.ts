import { type PenstockError, ReplyError, ServerUnavailable, Unauthorized } from "../errors.js";
import { type Server, textOf } from "../server/server.js";
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

/** Notices that a server of some keys was restarted or replaced: its connections reach another run. */
export class RunWatch {
  readonly #server: Server;
  readonly #keys: readonly string[];
  /** The connections when the runs were last asked for. */
  #made: number | null = null;
  /** The numbers of the keys on each server at that time, as text. Slots may move. */
  #together = "";
  /** The run of each of these servers. */
  #runs: readonly (string | null)[] = [];

  constructor(server: Server, keys: readonly string[]) {
    this.#server = server;
    this.#keys = keys;
  }

  /**
   * Return whether a server is another run than at the last call, or whether keys moved apart since, because their next
   * server may have been replaced, too. The first call only learns the runs. It costs nothing while no connection was
   * made. Where the run is hidden, each new connection counts as another one.
   *
   * @throws ServerUnavailable.
   */
  async isAnother(): Promise<boolean> {
    const { made } = this.#server;
    const numbers = this.#server.byServer(this.#keys);
    const together = JSON.stringify(numbers);
    const isApart = together !== this.#together;
    if (!isApart && made !== null && made === this.#made) return false;
    const runs: (string | null)[] = [];
    for (const [first] of numbers) runs.push(await readRun(this.#server, this.#keys[first as number] as string));
    const isFirst = this.#together === "";
    const isOther = (run: string | null, at: number) => (run === null ? made !== null : run !== this.#runs[at]);
    const isAnother = !isFirst && (isApart || runs.some(isOther));
    [this.#made, this.#together, this.#runs] = [made, together, runs];
    return isAnother;
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
