// The map of a cluster: which master holds which slot, how often the nodes are asked for it, and who is told of a
// change.

import { ServerUnavailable } from "../errors.js";
import { type Address, at, whereIs } from "./address.js";
import { Connection } from "./connection.js";
import { SLOTS, slotOf } from "./slots.js";

/** A node that is silent, and not dead, shows only by the map. */
const LOOK_MS = 2000;
/** The silence of one node after which the next one is asked. */
const ASK_MS = 1000;

/** A part of a cluster's slots, without the last number. */
export type SlotRange = readonly [first: number, end: number];

/** Takes note of a new map. */
type Changed = () => void;

/** Which master holds which slot, as the cluster last told it. Clients of one cluster share it. */
export class SlotMap {
  readonly #seeds: readonly [Address, ...Address[]];
  #masters: (Address | undefined)[] = [];
  /** Every node that the cluster named. The one that answered last comes first. */
  #nodes: Address[] = [];
  #asking: Promise<void> | null = null;
  readonly #users = new Set<Changed>();
  #timer: NodeJS.Timeout | undefined;

  /** @param seeds Nodes that the user named. */
  constructor(seeds: readonly [Address, ...Address[]]) {
    this.#seeds = seeds;
  }

  /** Look at the map every 2 s, and tell of each look, until `leave`. */
  use(changed: Changed): void {
    this.#users.add(changed);
    this.#timer ??= setInterval(() => void this.refresh().catch(() => {}), LOOK_MS).unref();
  }

  leave(changed: Changed): void {
    this.#users.delete(changed);
    if (this.#users.size > 0) return;
    clearInterval(this.#timer);
    this.#timer = undefined;
  }

  /** Return every master that holds a slot, in the order of slots. */
  get masters(): Address[] {
    return distinct(this.#masters.filter((one) => one !== undefined));
  }

  /** Return the slots of each master, in the order of `masters`. */
  get slots(): SlotRange[][] {
    const found = new Map<string, [number, number][]>();
    let last: string | null = null;
    for (let slot = 0; slot < SLOTS; slot += 1) {
      const master = this.#masters[slot];
      const name = master === undefined ? null : whereIs(master);
      if (name !== null) {
        const ranges = found.get(name) ?? [];
        if (name === last) (ranges.at(-1) as [number, number])[1] = slot + 1;
        else ranges.push([slot, slot + 1]);
        found.set(name, ranges);
      }
      last = name;
    }
    return [...found.values()];
  }

  /** Return the master that holds a key, any one for no key, or a seed while the cluster names none. */
  masterOf(key: string | undefined): Address {
    const found = key === undefined ? this.#masters.find((one) => one !== undefined) : this.#masters[slotOf(key)];
    return found ?? this.#seeds[0];
  }

  /** Note that a node named another one for a slot. */
  moved(slot: number, master: Address): void {
    this.#masters[slot] = master;
  }

  /** Ask the nodes in turn for the map, and take the first answer. Raises ServerUnavailable. */
  refresh(): Promise<void> {
    this.#asking ??= this.#refresh().finally(() => {
      this.#asking = null;
    });
    return this.#asking;
  }

  async #refresh(): Promise<void> {
    const failures: string[] = [];
    for (const node of distinct([...this.#nodes, ...this.#seeds])) {
      const connection = new Connection(node, ASK_MS);
      try {
        this.#take((await connection.sendCommand(["CLUSTER", "SLOTS"])) as unknown[][], node);
      } catch (error) {
        failures.push(`${whereIs(node)}: ${(error as Error).message}`);
        continue;
      } finally {
        connection.destroy();
      }
      for (const changed of this.#users) changed();
      return;
    }
    throw new ServerUnavailable(`no node of the cluster answers (${failures.join(", ")})`);
  }

  /** Take an answer: ranges of slots, each with its master and its replicas. */
  #take(answer: readonly unknown[][], asked: Address): void {
    const masters: (Address | undefined)[] = new Array(SLOTS).fill(undefined);
    const nodes = [asked];
    for (const [first, last, ...told] of answer) {
      const there = (told as unknown[][]).map(([host, port]) => nodeAt(asked, String(host ?? ""), Number(port)));
      masters.fill(there[0], Number(first), Number(last) + 1);
      nodes.push(...there);
    }
    this.#masters = masters;
    this.#nodes = distinct(nodes);
  }
}

/** Return the address that a node told of another one. One without a host is at the host that was asked. */
export function nodeAt(asked: Address, host: string, port: number): Address {
  return at(asked, host === "" || host === "?" ? (asked.socket.host as string) : host, port);
}

function distinct(addresses: readonly Address[]): Address[] {
  return [...new Map(addresses.map((one) => [whereIs(one), one])).values()];
}
