// The control client: sends commands and scripts to a server or a cluster, raises Penstock's errors, and parses
// answers. The address in `PENSTOCK_URL` is read here.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { BadOption, ReplyError, ServerUnavailable } from "../errors.js";
import type { OptionNames } from "../options.js";
import { loadScript } from "../scripts.js";
import { now, type Outage } from "../waiting.js";
import { withoutPassword } from "./address.js";
import { connect } from "./connect.js";
import { translated } from "./errorTranslation.js";
import type { SlotRange } from "./slotMap.js";
import { keyOf, slotOf } from "./slots.js";
import type { RedisLike, Transport } from "./transport.js";

export { translated } from "./errorTranslation.js";

/** Where the server is. */
export interface ServerOptions {
  /** A client that is connected. The caller closes it. */
  readonly client?: RedisLike;
  /** The server's address. Default PENSTOCK_URL, else redis://localhost:6379. */
  readonly url?: string;
}

export const SERVER_OPTIONS = { client: true, url: true } satisfies OptionNames<ServerOptions>;

export type Argument = string | number | Buffer;

const DEFAULT_URL = "redis://localhost:6379";
/** RESP_TYPES.BLOB_STRING of `@redis/client`. Other clients ignore the options. */
const AS_BUFFERS = { typeMapping: { 36: Buffer } };
/** A command that was sent and not answered. */
interface Mark {
  readonly at: number;
  readonly key: string | undefined;
}

/** What clients of Redis offer to make another connection. */
interface Duplicating extends Transport {
  connect?(): Promise<unknown>;
  on?(event: "error", listener: () => void): unknown;
  disconnect?(): unknown;
}

/** The server, or the cluster, that holds streams. */
export class Server {
  readonly #client: Transport;
  /** Whether this closes the client. */
  readonly #isOwn: boolean;
  readonly #outage: Outage | null;
  /** The commands without an answer. The oldest comes first. */
  readonly #asked: Set<Mark>;
  /** The address that it was opened with, with the user and without the password. */
  readonly #address: string;

  private constructor(
    client: Transport,
    address: string,
    isOwn: boolean,
    outage: Outage | null = null,
    asked: Set<Mark> = new Set(),
  ) {
    this.#client = client;
    this.#address = address;
    this.#isOwn = isOwn;
    this.#outage = outage;
    this.#asked = asked;
  }

  /** Connect. Raises ServerUnavailable, or ServerUnsuitable for a server that cannot hold streams. */
  static async open(options: ServerOptions): Promise<Server> {
    const { client, url } = options;
    const address = addressOf(options);
    if (client !== undefined) return new Server(client, address, false);
    return new Server(await connect(url ?? urlOfEnvironment()), address, true);
  }

  /** Return connections of its own to the same server, or null for a client that makes none. Raises ServerUnavailable. */
  async another(): Promise<Server | null> {
    const copy = (this.#client as { duplicate?(): Duplicating }).duplicate?.();
    if (copy === undefined) return null;
    copy.on?.("error", () => {}); // commands fail by themselves, and a listener must be there
    await copy.connect?.();
    return new Server(copy, this.#address, true);
  }

  /** Close the connections, if this made them. */
  close(): void {
    if (!this.#isOwn) return;
    const { destroy, disconnect } = this.#client as Duplicating;
    (destroy ?? disconnect)?.call(this.#client);
  }

  /** Let later answers use the memory of these values. Nobody may use them from now on. */
  recycle(values: readonly Buffer[]): void {
    if (this.#isOwn) for (const value of values) this.#client.recycle?.(value);
  }

  /** Return this server with commands that are repeated while it is away. They must be safe to repeat. */
  patient(outage: Outage): Server {
    return new Server(this.#client, this.#address, false, outage, this.#asked);
  }

  /** Return for how long the server has owed an answer, or 0. Of a cluster, this is the slowest server, in words. */
  get silence(): { readonly ms: number; readonly where: string } {
    const [oldest] = this.#asked;
    if (oldest === undefined) return { ms: 0, where: "" };
    return { ms: now() - oldest.at, where: this.#client.placeOf?.(oldest.key) ?? "" };
  }

  /** Return a text that is the same for two keys if one server holds both. */
  placeOf(key: string): string {
    const place = this.#client.placeOf?.(key) ?? this.#client.primary?.();
    return place ?? (this.#client.masters === undefined ? "" : String(slotOf(key)));
  }

  /** Return the address of the server that has a key, in words. A client that does not tell names the whole. */
  whereIs(key: string): string {
    return this.#client.placeOf?.(key) ?? this.#client.primary?.() ?? this.#address;
  }

  /** The connections that were made, or null for a client that does not tell. */
  get made(): number | null {
    return this.#client.made ?? null;
  }

  /** Return the numbers of these keys, in a list for each server that holds some of them now. */
  byServer(keys: readonly string[]): number[][] {
    const together = new Map<string, number[]>();
    for (const [number, key] of keys.entries()) {
      const place = this.placeOf(key);
      together.set(place, [...(together.get(place) ?? []), number]);
    }
    return [...together.values()];
  }

  /**
   * Return the same after asking the cluster, if it is not one list. A redirection tells of one slot, also if a replica
   * took over all slots of its master.
   */
  async byServerNow(keys: readonly string[]): Promise<number[][]> {
    if (this.byServer(keys).length > 1) await this.#client.lookAround?.();
    return this.byServer(keys);
  }

  /** Return the servers of a cluster that hold keys, in words, or nothing for one server or a client that does not tell. */
  get holders(): string[] {
    return [...(this.#client.holders?.().keys() ?? [])];
  }

  /** Return the answer of one of the `holders` to INFO, or null if it is none. Raises the errors of this package. */
  async infoOf(place: string): Promise<string | null> {
    const client = this.#client.holders?.().get(place);
    return client === undefined ? null : textOf(await client.sendCommand(["INFO"], AS_BUFFERS));
  }

  /** Return the slots of each server of a cluster, or nothing for one server or for a client that does not tell. */
  get slots(): SlotRange[][] {
    return this.#client.slots?.() ?? [];
  }

  /** Ask each server that holds keys. Returns the answers. */
  async onEach<T>(ask: (server: Server) => Promise<T>): Promise<T[]> {
    const act = () => {
      const masters = this.#client.masters?.() ?? [this.#client];
      return Promise.all(masters.map((one) => ask(new Server(one, this.#address, false, null, this.#asked))));
    };
    return this.#outage === null ? await act() : await this.#outage.through(act);
  }

  /** Send a command and return the answer. Raises the errors of this package. */
  async call(...args: readonly Argument[]): Promise<unknown> {
    return await this.#send(args, keyOf(args));
  }

  /** Send a command without a key to the server that holds a key, and return the answer. */
  async callAt(key: string, ...args: readonly Argument[]): Promise<unknown> {
    return await this.#send(args, key);
  }

  async #send(args: readonly Argument[], key: string | undefined): Promise<unknown> {
    const ask = () => this.#ask(args, key);
    return this.#outage === null ? await ask() : await this.#outage.through(ask);
  }

  async #ask(args: readonly Argument[], key: string | undefined): Promise<unknown> {
    const mark = { at: now(), key };
    this.#asked.add(mark);
    try {
      return await this.#client.sendCommand(args.map(worded), { ...AS_BUFFERS, at: key });
    } catch (error) {
      throw translated(error as Error, args, this.#address);
    } finally {
      this.#asked.delete(mark);
    }
  }

  /**
   * Send commands one behind the other, such as a transaction. They are sent on one connection, or not all of them. One
   * server must hold all their keys.
   *
   * @returns What each was answered: an error of this package where it failed.
   */
  async sequence(commands: readonly (readonly Argument[])[]): Promise<unknown[]> {
    if (this.#outage === null) return await this.#askAll(commands);
    return await this.#outage.through(async () => {
      const answers = await this.#askAll(commands);
      const failure = answers.find((one) => one instanceof ServerUnavailable);
      if (failure !== undefined) throw failure;
      return answers;
    });
  }

  async #askAll(commands: readonly (readonly Argument[])[]): Promise<unknown[]> {
    const key = commands.map(keyOf).find((one) => one !== undefined);
    // by the id a client of `@redis/client` knows that it must not send a part of them on a new connection
    const options = { ...AS_BUFFERS, at: key, chainId: Symbol("sequence") };
    const mark = { at: now(), key };
    this.#asked.add(mark);
    const sent = commands.map((args) => this.#client.sendCommand(args.map(worded), options));
    const settled = await Promise.allSettled(sent);
    this.#asked.delete(mark);
    const answers = settled.map((one, number) =>
      one.status === "fulfilled" ? one.value : translated(one.reason as Error, commands[number] ?? [], this.#address),
    );
    // EXECABORT does not say why: the command that was refused before it does
    const cause = answers.find((one) => one instanceof Error);
    return answers.map((one) => (one instanceof ReplyError && one.message.startsWith("EXECABORT") ? cause : one));
  }

  /**
   * Run a script of `dist/scripts`.
   *
   * @param name The file's name, without `.lua`.
   */
  async run(name: string, keys: readonly string[], args: readonly Argument[]): Promise<unknown> {
    const { text, digest } = scriptOf(name);
    try {
      return await this.call("EVALSHA", digest, keys.length, ...keys, ...args);
    } catch (error) {
      if (!(error instanceof ReplyError && error.message.includes("NOSCRIPT"))) throw error;
      return await this.call("EVAL", text, keys.length, ...keys, ...args);
    }
  }
}

/** Return where the server is, with the user and without the password, for people. */
export function addressOf({ client, url }: ServerOptions): string {
  return client === undefined ? withoutPassword(url ?? urlOfEnvironment()) : "the server";
}

function urlOfEnvironment(): string {
  const { PENSTOCK_URL, PENSTOCK_URL_FILE } = process.env;
  if (PENSTOCK_URL_FILE) return readFileSync(PENSTOCK_URL_FILE, "utf8").trim();
  return PENSTOCK_URL || DEFAULT_URL;
}

const scripts = new Map<string, { text: string; digest: string }>();

function scriptOf(name: string): { text: string; digest: string } {
  let found = scripts.get(name);
  if (found === undefined) {
    const text = loadScript(name);
    found = { text, digest: createHash("sha1").update(text).digest("hex") };
    scripts.set(name, found);
  }
  return found;
}

function worded(one: Argument): string | Buffer {
  return typeof one === "number" ? String(one) : one;
}

// --- answers ---

/** Return a bulk string as bytes. */
export function bytesOf(reply: unknown): Buffer {
  if (Buffer.isBuffer(reply)) return reply;
  throw new BadOption("the client answers with strings, which damages payloads: it has to return Buffers");
}

/** Return a bulk string as text, or null for none. */
export function textOf(reply: unknown): string | null {
  if (reply === null || reply === undefined) return null;
  return typeof reply === "string" ? reply : bytesOf(reply).toString("utf8");
}

/** Return a hash as a Map. RESP2 answers with names and values in turn, RESP3 with a map. */
export function hashOf(reply: unknown): Map<string, string> {
  const found = new Map<string, string>();
  if (Array.isArray(reply)) {
    for (let at = 0; at + 1 < reply.length; at += 2)
      found.set(textOf(reply[at]) as string, textOf(reply[at + 1]) as string);
    return found;
  }
  const pairs = reply instanceof Map ? reply : Object.entries(reply as object);
  for (const [name, value] of pairs) found.set(textOf(name) as string, textOf(value) as string);
  return found;
}

/** An entry of a Redis stream: its id, and names and values in turn. */
export type StreamEntry = readonly [id: Buffer, fields: readonly Buffer[]];

/** Return the answer of XRANGE. */
export function entriesOf(reply: unknown): StreamEntry[] {
  return reply as StreamEntry[];
}
