import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { BadOption, DamagedKey, PenstockError, ReplyError, ServerUnavailable, Unauthorized } from "../errors.js";
import { loadScript } from "../scripts.js";
import { now, type Outage } from "../waiting.js";
import { Connection } from "./connection.js";

/**
 * A client of a Redis server, with one method. A client of `@redis/client` is one.
 * For ioredis: `{ sendCommand: ([name, ...args]) => redis.callBuffer(name, ...args) }`.
 */
export interface RedisLike {
  /** Send a command. The answer has bulk strings as Buffers. */
  sendCommand(args: readonly (string | Buffer)[], options?: object): Promise<unknown>;
}

/** Where the server is. */
export interface ServerOptions {
  /** A client that is connected. The caller closes it. */
  readonly client?: RedisLike;
  /** The server's address. Default PENSTOCK_URL, else redis://localhost:6379. */
  readonly url?: string;
}

export type Argument = string | number | Buffer;

const DEFAULT_URL = "redis://localhost:6379";
/** RESP_TYPES.BLOB_STRING of `@redis/client`. Other clients ignore the options. */
const AS_BUFFERS = { typeMapping: { 36: Buffer } };
const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY|UNBLOCKED|MISCONF)\b/;
const FORBIDDEN = /^(NOAUTH|WRONGPASS|NOPERM)\b/;
/** What scripts and commands say where another program changed a key. */
const DAMAGED = /WRONGTYPE|value is not an integer|Expected value but found|Invalid stream ID|comparison/;

/** A server that holds streams. */
export class Server {
  readonly #client: RedisLike;
  readonly #own: Connection | null;
  readonly #outage: Outage | null;
  /** When each command without an answer was sent. The oldest comes first. */
  readonly #asked: Set<{ at: number }>;

  private constructor(
    client: RedisLike,
    own: Connection | null,
    outage: Outage | null = null,
    asked: Set<{ at: number }> = new Set(),
  ) {
    this.#client = client;
    this.#own = own;
    this.#outage = outage;
    this.#asked = asked;
  }

  /** Connect. Raises ServerUnavailable. */
  static async open({ client, url }: ServerOptions): Promise<Server> {
    if (client !== undefined) return new Server(client, null);
    const own = await connect(url ?? urlOfEnvironment());
    return new Server(own, own);
  }

  /** Close the connection, if `open` made it. */
  close(): void {
    this.#own?.destroy();
  }

  /** Let later answers use the memory of these values. Nobody may use them from now on. */
  recycle(values: readonly Buffer[]): void {
    for (const value of values) this.#own?.recycle(value);
  }

  /** Return this server with commands that are repeated while it is away. They must be safe to repeat. */
  patient(outage: Outage): Server {
    return new Server(this.#client, null, outage, this.#asked);
  }

  /** Return for how long the server has owed an answer, or 0. */
  get silentMs(): number {
    const [oldest] = this.#asked;
    return oldest === undefined ? 0 : now() - oldest.at;
  }

  /** Send a command and return the answer. Raises the errors of this package. */
  async call(...args: readonly Argument[]): Promise<unknown> {
    return this.#outage === null ? await this.#ask(args) : await this.#outage.through(() => this.#ask(args));
  }

  async #ask(args: readonly Argument[]): Promise<unknown> {
    const sent = args.map(worded);
    const mark = { at: now() };
    this.#asked.add(mark);
    try {
      return await this.#client.sendCommand(sent, AS_BUFFERS);
    } catch (error) {
      throw translated(error as Error, args);
    } finally {
      this.#asked.delete(mark);
    }
  }

  /**
   * Send commands one behind the other, such as a transaction. They are sent on one connection, or not all of them.
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
    // by the id a client of `@redis/client` knows that it must not send a part of them on a new connection
    const options = { ...AS_BUFFERS, chainId: Symbol("sequence") };
    const mark = { at: now() };
    this.#asked.add(mark);
    const sent = commands.map((args) => this.#client.sendCommand(args.map(worded), options));
    const settled = await Promise.allSettled(sent);
    this.#asked.delete(mark);
    return settled.map((one, at) =>
      one.status === "fulfilled" ? one.value : translated(one.reason as Error, commands[at] ?? []),
    );
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

async function connect(url: string): Promise<Connection> {
  const own = new Connection(url);
  try {
    await own.sendCommand(["PING"]);
  } catch (error) {
    own.destroy();
    throw translated(error as Error, []);
  }
  return own;
}

/** Return where the server is, without a password, for people. */
export function addressOf({ client, url }: ServerOptions): string {
  const text = client === undefined ? (url ?? urlOfEnvironment()) : "";
  if (!URL.canParse(text)) return "the server";
  const parsed = new URL(text);
  parsed.username = parsed.password = "";
  return parsed.href;
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

/** Return an error of a client, or an error in the answer of EXEC, as one of this package. */
export function translated(error: Error, args: readonly Argument[]): Error {
  if (error instanceof PenstockError || error instanceof TypeError) return error;
  const { message } = error;
  if (!isReply(error)) return new ServerUnavailable(`the server is away: ${message}`, { cause: error });
  const key = args.find((one) => typeof one === "string" && one.startsWith("penstock:"));
  if (FORBIDDEN.test(message)) return new Unauthorized(message, { cause: error });
  if (PASSING.test(message)) return new ServerUnavailable(message, { cause: error });
  if (DAMAGED.test(message)) {
    return new DamagedKey(`${key ?? "a key"} holds something that Penstock did not write: ${message.slice(0, 200)}`);
  }
  return new ReplyError(message, { cause: error });
}

/** Return whether the server answered with an error, which clients tell by a class of their own. */
function isReply(error: Error): boolean {
  return /^(ErrorReply|SimpleError|BlobError|ReplyError)$/.test(error.name) || /Error(Reply)?$/.test(error.name)
    ? /^[A-Z]{2,}\b/.test(error.message) && !("code" in error && typeof error.code === "string")
    : false;
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
