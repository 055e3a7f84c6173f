// The interfaces of a connection: what a user's Redis client must have (`RedisLike`), and what this package's
// connections have (`Transport`).

import type { SlotRange } from "./slotMap.js";

/** Where a command goes, and with which others. */
export interface Sending {
  /** The key whose server answers the command. Undefined where any server may. */
  readonly at?: string | undefined;
  /** Of the commands of one sequence. They are sent on one connection, and a part of them is never sent again. */
  readonly chainId?: symbol;
}

/**
 * A client of a Redis server, with one method. A client of `@redis/client` is one.
 * For ioredis: `{ sendCommand: ([name, ...args]) => redis.callBuffer(name, ...args) }`.
 *
 * A client of a cluster sends each command to the server of the key `at` in the options, keeps the commands of one
 * `chainId` together, and has `masters`. With `url` the package does that itself.
 */
export interface RedisLike {
  /** Send a command. The answer has bulk strings as Buffers. */
  sendCommand(args: readonly (string | Buffer)[], options?: object): Promise<unknown>;
  /** Return a client of each server of a cluster that holds keys. */
  masters?(): readonly RedisLike[];
}

/** Connections that this package makes. */
export interface Transport extends RedisLike {
  masters?(): readonly Transport[];
  /** Return the server that holds a key, in words. */
  placeOf?(key: string | undefined): string;
  /** Return the primary of a service, in words. A failover changes it. */
  primary?(): string;
  /** Return a client of each server of a cluster that holds keys, by its place in words. */
  holders?(): ReadonlyMap<string, Transport>;
  /** Return the slots of each server. */
  slots?(): SlotRange[][];
  /** Ask a cluster which server has which slot. */
  lookAround?(): Promise<void>;
  /** The connections that it has made. A server that is another one since then is behind a new one. */
  readonly made?: number;
  /** Return further connections to the same server. */
  duplicate?(): Transport;
  /** Receive later values in the memory of a value. Nobody may use that value from now on. */
  recycle?(value: Buffer): void;
  /** Close the connections. */
  destroy?(): void;
}
