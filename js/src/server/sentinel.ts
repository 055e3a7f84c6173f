// The connection to the primary of a service that Sentinels watch: when they are asked for it, and when a former
// primary is left.

import { ServerUnavailable } from "../errors.js";
import { type Address, at, type Service, whereIs } from "./address.js";
import { Connection } from "./connection.js";
import { ErrorReply } from "./resp.js";
import type { Transport } from "./transport.js";

/** A primary that is cut off from its Sentinels closes no connection. */
const LOOK_MS = 2000;
/** The silence of one Sentinel after which the next one is asked. */
const ASK_MS = 1000;

/** The primary that is used, and where it is. */
interface Primary {
  readonly connection: Connection;
  readonly where: string;
}

/** A connection to the primary of a service. After a failure, the next command asks the Sentinels for it again. */
export class SentinelClient implements Transport {
  readonly #service: Service;
  readonly #timer: NodeJS.Timeout;
  #opening: Promise<Primary> | null = null;
  #primary: Primary | null = null;
  /** The primary that was used last. */
  #where = "";
  #isClosed = false;
  /** See `Transport.made`. */
  made = 0;
  /** The clients of this process that are in use. */
  static readonly #all = new Set<SentinelClient>();

  constructor(service: Service) {
    this.#service = service;
    SentinelClient.#all.add(this);
    this.#timer = setInterval(() => void this.#look(), LOOK_MS).unref();
  }

  async sendCommand(args: readonly (string | Buffer)[]): Promise<unknown> {
    if (this.#isClosed) throw new Error("the connection was closed");
    this.#opening ??= this.#open();
    // commands of one tick wait for one promise, so they are sent in order and together
    const primary = await this.#opening;
    try {
      return await primary.connection.sendCommand(args);
    } catch (error) {
      const isReply = error instanceof ErrorReply;
      if (!isReply || error.message.startsWith("READONLY")) this.#drop(primary, "the connection broke");
      if (isReply) throw error;
      throw new ServerUnavailable(`${primary.where} is away: ${(error as Error).message}`, { cause: error });
    }
  }

  primary(): string {
    return this.#where;
  }

  duplicate(): SentinelClient {
    return new SentinelClient(this.#service);
  }

  recycle(value: Buffer): void {
    this.#primary?.connection.recycle(value);
  }

  destroy(): void {
    this.#isClosed = true;
    SentinelClient.#all.delete(this);
    clearInterval(this.#timer);
    this.#primary?.connection.destroy();
  }

  async #open(): Promise<Primary> {
    let connection: Connection | undefined;
    try {
      const address = await this.#find();
      connection = new Connection(address);
      // the Sentinels may report a failover late
      const [role] = (await connection.sendCommand(["ROLE"])) as unknown[];
      const where = whereIs(address);
      if (String(role) !== "master") throw new ServerUnavailable(`${where} is no primary at this moment`);
      if (this.#isClosed) throw new Error("the connection was closed");
      this.#primary = { connection, where };
      this.#where = where;
      this.made += 1;
      this.#leaveOthers();
      return this.#primary;
    } catch (error) {
      connection?.destroy();
      this.#opening = null;
      throw error;
    }
  }

  /** Return where the primary is, from the first Sentinel that knows it. Raises ServerUnavailable. */
  async #find(): Promise<Address> {
    const { name, sentinels, server } = this.#service;
    const found: string[] = [];
    for (const sentinel of sentinels) {
      const connection = new Connection(sentinel, ASK_MS);
      try {
        const answer = await connection.sendCommand(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", name]);
        if (Array.isArray(answer)) return at(server, String(answer[0]), Number(answer[1]));
        found.push(`${whereIs(sentinel)} knows no service '${name}'`);
      } catch (error) {
        found.push(`${whereIs(sentinel)}: ${(error as Error).message}`);
      } finally {
        connection.destroy();
      }
    }
    throw new ServerUnavailable(
      `no Sentinel names a primary (${found.join(", ")}): see that they run, and that the last part of the address is ` +
        "the service",
    );
  }

  /**
   * End the connections of this client and its duplicates to another server than this one, which is the primary. A reader
   * that asks two servers could miss on one of them what it found on the other.
   */
  #leaveOthers(): void {
    for (const other of SentinelClient.#all) {
      const primary = other.#service === this.#service ? other.#primary : null;
      if (primary !== null && primary.where !== this.#where) other.#drop(primary, "it is no primary any more");
    }
  }

  /** Leave a primary that is none any more. */
  async #look(): Promise<void> {
    const before = this.#primary;
    if (before === null) return;
    const address = await this.#find().catch(() => null);
    if (address !== null && whereIs(address) !== before.where) this.#drop(before, "it is no primary any more");
  }

  #drop(primary: Primary, why: string): void {
    primary.connection.destroy(why);
    if (this.#primary === primary) this.#primary = this.#opening = null;
  }
}
