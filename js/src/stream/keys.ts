// The names of a stream's keys, and which names of streams, groups and members are allowed. docs/redis-keys.md gives
// contents and lifetimes.

import { BadName } from "../errors.js";

const NAME = /^[A-Za-z0-9.-][A-Za-z0-9._-]{0,99}$/;
/** The hash tag of a partition: the stream's id and a number. */
const TAG = /^[0-9a-f]{12}\.[0-9]{1,10}$/;

/** The consumer that holds the entries that members returned. */
export const RELEASED = "~released";
/** The group of each entries key that never reads. Its last-delivered id is the newest entry. */
export const LAST = "_last";

/** Return whether a name may be part of a key. */
export function isName(name: string): boolean {
  return NAME.test(name);
}

/** Return whether a text is the hash tag of a partition. */
export function isTag(text: unknown): text is string {
  return typeof text === "string" && TAG.test(text);
}

/** Raise RangeError for a name on a roster that no one could join as. Names are in commands that people paste. */
export function requireNames(names: Iterable<string>): void {
  for (const name of names) {
    if (!NAME.test(name)) throw new RangeError(`'${name.slice(0, 80)}' is no name of a group or member`);
  }
}

/** Return a name that may be part of a key. Raises BadName. */
export function checkedName(kind: string, name: string): string {
  if (typeof name === "string" && NAME.test(name)) return name;
  throw new BadName(
    `${kind} name ${JSON.stringify(name)}: use 1 to 100 letters, digits, '.', '_', '-', not starting with '_'`,
  );
}

/** The keys of a stream as a whole. docs/redis-keys.md gives their contents. */
export class StreamKeys {
  readonly #prefix: string;

  constructor(name: string) {
    this.#prefix = `penstock:{${name}}:`;
  }

  get meta(): string {
    return `${this.#prefix}meta`;
  }

  get epochs(): string {
    return `${this.#prefix}epochs`;
  }

  get events(): string {
    return `${this.#prefix}events`;
  }

  /** The reported rates of workers and trainers. */
  get rates(): string {
    return `${this.#prefix}paces`;
  }

  manifest(epoch: number): string {
    return `${this.#prefix}${epoch}:manifest`;
  }
}

/** The keys of one partition. */
export class PartitionKeys {
  readonly number: number;
  readonly #prefix: string;

  constructor(name: string, tag: string, number: number) {
    this.number = number;
    this.#prefix = `penstock:{${name}.${tag}}:`;
  }

  get roster(): string {
    return `${this.#prefix}roster`;
  }

  entries(epoch: number): string {
    return `${this.#prefix}${epoch}:entries`;
  }

  state(epoch: number): string {
    return `${this.#prefix}${epoch}:state`;
  }

  index(epoch: number, shard: number): string {
    return `${this.#prefix}${epoch}:${shard}:index`;
  }

  repairs(epoch: number, shard: number): string {
    return `${this.#prefix}${epoch}:${shard}:repairs`;
  }

  ledger(epoch: number, group: string, shard: number): string {
    return `${this.#prefix}${epoch}:ledger:${group}:${shard}`;
  }

  positions(epoch: number, group: string): string {
    return `${this.#prefix}${epoch}:pos:${group}`;
  }

  dead(epoch: number, group: string): string {
    return `${this.#prefix}${epoch}:dead:${group}`;
  }

  segments(epoch: number): string {
    return `${this.#prefix}${epoch}:segments`;
  }

  quarantine(epoch: number): string {
    return `${this.#prefix}${epoch}:quarantine`;
  }
}
