// The connection to a cluster: each command goes to the master that holds its key. MOVED is followed, and ASK, TRYAGAIN
// and CLUSTERDOWN become errors that say what to do.

import { ServerUnavailable } from "../errors.js";
import { type Address, whereIs } from "./address.js";
import { Connection } from "./connection.js";
import { translated } from "./errorTranslation.js";
import { ErrorReply } from "./resp.js";
import { nodeAt, SlotMap, type SlotRange } from "./slotMap.js";
import { SLOTS } from "./slots.js";
import type { Sending, Transport } from "./transport.js";

/** The redirections that one command follows at once. Nodes that redirect to each other are an outage. */
const REDIRECTIONS = 8;
const MOVED = /^MOVED ([0-9]+) (.*):([0-9]+)$/;
const ASK = /^ASK ([0-9]+) (.*)$/;

type Words = readonly (string | Buffer)[];

/** Connections to the masters of a cluster. Each command goes to the master that holds its key. */
export class Cluster implements Transport {
  readonly #map: SlotMap;
  readonly #nodes = new Map<string, Connection>();
  readonly #changed = () => this.#dropDemoted();
  #isClosed = false;
  /** The connections made to nodes that are no masters any more. */
  #madeBefore = 0;

  private constructor(map: SlotMap) {
    this.#map = map;
    map.use(this.#changed);
  }

  /** Ask for the map. Raises ServerUnavailable. */
  static async open(seeds: readonly [Address, ...Address[]]): Promise<Cluster> {
    const map = new SlotMap(seeds);
    await map.refresh();
    return new Cluster(map);
  }

  /** Send a command. A redirection is followed, but for a part of a sequence, which is sent as a whole or not at all. */
  async sendCommand(args: Words, { at, chainId }: Sending = {}): Promise<unknown> {
    for (let turn = 0; ; turn += 1) {
      const master = this.#map.masterOf(at);
      try {
        return await this.#nodeAt(master).sendCommand(args);
      } catch (error) {
        const mayFollow = this.#follow(error as Error, master) && chainId === undefined && turn < REDIRECTIONS;
        if (!mayFollow) throw await this.#failure(error as Error, master);
      }
    }
  }

  masters(): Transport[] {
    return [...this.holders().values()];
  }

  holders(): Map<string, Transport> {
    return new Map(this.#map.masters.map((master) => [whereIs(master), this.#at(master)]));
  }

  #at(master: Address): Transport {
    return {
      sendCommand: async (args: Words) => {
        try {
          return await this.#nodeAt(master).sendCommand(args);
        } catch (error) {
          throw await this.#failure(error as Error, master);
        }
      },
    };
  }

  get made(): number {
    return [...this.#nodes.values()].reduce((sum, { made }) => sum + made, this.#madeBefore);
  }

  placeOf(key: string | undefined): string {
    return whereIs(this.#map.masterOf(key));
  }

  slots(): SlotRange[][] {
    return this.#map.slots;
  }

  lookAround(): Promise<void> {
    return this.#map.refresh();
  }

  /** Return further connections to the same cluster, with the same map. */
  duplicate(): Cluster {
    return new Cluster(this.#map);
  }

  recycle(value: Buffer): void {
    for (const node of this.#nodes.values()) node.recycle(value);
  }

  destroy(): void {
    this.#isClosed = true;
    this.#map.leave(this.#changed);
    for (const node of this.#nodes.values()) node.destroy();
  }

  #nodeAt(master: Address): Connection {
    if (this.#isClosed) throw new Error("the connection was closed");
    const name = whereIs(master);
    const node = this.#nodes.get(name) ?? new Connection(master);
    this.#nodes.set(name, node);
    return node;
  }

  /** End connections to nodes that are no masters any more. One that is silent would not end them itself. */
  #dropDemoted(): void {
    const masters = new Set(this.#map.masters.map(whereIs));
    for (const [name, node] of this.#nodes) {
      if (masters.has(name)) continue;
      this.#nodes.delete(name);
      this.#madeBefore += node.made;
      node.destroy("it is no master any more");
    }
  }

  /** Return whether the node said which other one holds the slot. The next command goes there. */
  #follow(error: Error, master: Address): boolean {
    const [, slot, host = "", port] = (error instanceof ErrorReply && MOVED.exec(error.message)) || [];
    if (slot === undefined || Number(slot) >= SLOTS) return false;
    this.#map.moved(Number(slot), nodeAt(master, host, Number(port)));
    return true;
  }

  /** Return the error for a user. If the node is away, the map is asked for first. */
  async #failure(error: Error, master: Address): Promise<Error> {
    const where = whereIs(master);
    const found = error instanceof ErrorReply ? refusal(error, where) : away(error, where);
    if (found instanceof ServerUnavailable && !this.#isClosed) await this.#map.refresh().catch(() => {});
    return found;
  }
}

function away(error: Error, where: string): Error {
  return new ServerUnavailable(`${where} is away: ${error.message}`, { cause: error });
}

/** Return what a node said, in words, and what to do if that lasts. */
function refusal(error: ErrorReply, where: string): Error {
  const { message } = error;
  const [, slot, host, port] = MOVED.exec(message) ?? [];
  const [, half, to] = ASK.exec(message) ?? [];
  const said = (text: string) => new ServerUnavailable(text, { cause: error, isSaid: true });
  if (slot !== undefined) return said(`slot ${slot} moved from ${where} to ${host}:${port}`);
  const fix = "is half moved: if that lasts, finish it with `redis-cli --cluster fix HOST:PORT`";
  if (half !== undefined) return said(`slot ${half} moves from ${where} to ${to} and ${fix}`);
  if (message.startsWith("TRYAGAIN")) return said(`a slot moves away from ${where} and ${fix}`);
  if (message.startsWith("CLUSTERDOWN")) {
    return said(
      `the cluster of ${where} does not serve these keys (${message}): see that each master or a replica of it runs ` +
        "(`CLUSTER NODES`)",
    );
  }
  const found = translated(error, []);
  return found instanceof ServerUnavailable ? said(`${message} (${where})`) : error;
}
