// A connection to one server over TCP, TLS or a Unix socket: login, commands sent together, and the timeouts of
// connecting and of answers.

import { connect as connectPlain, type NetConnectOpts, type Socket } from "node:net";
import { type ConnectionOptions, connect as connectTls } from "node:tls";
import { type Address, parseAddresses } from "./address.js";
import { ErrorReply, pack, RespReader } from "./resp.js";

const CONNECT_TIMEOUT_MS = 5000;
/** Redis 6.2 is silent during a long UNLINK or FLUSHALL. */
const REPLY_TIMEOUT_MS = 30_000;
export const SILENT = "the server does not answer";

interface Pending {
  readonly resolve: (reply: unknown) => void;
  readonly reject: (error: Error) => void;
}

/** A connection to the server of a URL. After a failure the next command connects again. */
export class Connection {
  readonly #address: Address;
  readonly #replyTimeoutMs: number;
  #session: Session | null = null;
  #isClosed = false;
  /** See `Transport.made`. */
  made = 0;

  /**
   * @param address Where the server is, or redis://, rediss:// or unix://. Raises BadOption.
   * @param replyTimeoutMs The longest silence while an answer is owed.
   */
  constructor(address: Address | string, replyTimeoutMs = REPLY_TIMEOUT_MS) {
    this.#address = typeof address === "string" ? parseAddresses(address)[0] : address;
    this.#replyTimeoutMs = replyTimeoutMs;
  }

  /** Return another connection to the same server. */
  duplicate(): Connection {
    return new Connection(this.#address, this.#replyTimeoutMs);
  }

  /**
   * Send a command. Commands of one tick are sent together on one connection, in order.
   *
   * @returns The answer, with bulk strings as Buffers. Large ones are received where they stay.
   */
  sendCommand(args: readonly (string | Buffer)[]): Promise<unknown> {
    if (this.#isClosed) return Promise.reject(new Error("the connection was closed"));
    if (this.#session?.isOpen !== true) {
      this.#session = new Session(this.#address, this.#replyTimeoutMs);
      this.made += 1;
    }
    return this.#session.send(args);
  }

  /** Receive later values in the memory of a value. Nobody may use that value from now on. */
  recycle(value: Buffer): void {
    this.#session?.recycle(value);
  }

  /** Close the connection. Commands without an answer fail, for this reason. */
  destroy(why = "the connection was closed"): void {
    this.#isClosed = true;
    this.#session?.end(new Error(why));
  }
}

/** One socket, from its connection to its end. */
class Session {
  readonly #socket: Socket;
  readonly #reader = new RespReader((reply) => this.#answer(reply));
  readonly #pending: Pending[] = [];
  #unsent: (string | Buffer)[] = [];
  isOpen = true;

  constructor({ socket, isTls, login }: Address, replyTimeoutMs: number) {
    const onread = { buffer: () => this.#reader.room(), callback: (received: number) => this.#take(received) };
    const options = { ...socket, onread, noDelay: true, keepAlive: true } as unknown;
    this.#socket = isTls ? connectTls(options as ConnectionOptions) : connectPlain(options as NetConnectOpts);
    // the socket's own timeout begins again with what TLS sends first
    const late = setTimeout(() => this.end(new Error(SILENT)), Math.min(CONNECT_TIMEOUT_MS, replyTimeoutMs));
    this.#socket.once("close", () => clearTimeout(late));
    this.#socket.once(isTls ? "secureConnect" : "connect", () => {
      clearTimeout(late);
      this.#socket.setTimeout(replyTimeoutMs);
    });
    this.#socket.on("timeout", () => {
      if (this.#pending.length > 0) this.end(new Error(SILENT));
    });
    this.#socket.on("error", (error: NodeJS.ErrnoException) => {
      this.end(error.message === "" ? new Error(error.code, { cause: error }) : error); // of several addresses it is ""
    });
    this.#socket.on("close", () => this.end(new Error("the server closed the connection")));
    for (const command of login) this.#append(command, { resolve: () => {}, reject: (error) => this.end(error) });
  }

  send(args: readonly (string | Buffer)[]): Promise<unknown> {
    return new Promise((resolve, reject) => this.#append(args, { resolve, reject }));
  }

  recycle(value: Buffer): void {
    this.#reader.recycle(value);
  }

  end(error: Error): void {
    if (!this.isOpen) return;
    this.isOpen = false;
    this.#socket.destroy();
    for (const { reject } of this.#pending) reject(error);
  }

  #append(args: readonly (string | Buffer)[], pending: Pending): void {
    if (this.#unsent.length === 0) process.nextTick(() => this.#flush());
    pack(args, this.#unsent);
    this.#pending.push(pending);
  }

  #flush(): void {
    const pieces = this.#unsent;
    this.#unsent = [];
    this.#socket.cork();
    for (const piece of pieces) this.#socket.write(piece);
    this.#socket.uncork();
  }

  #take(received: number): boolean {
    try {
      this.#reader.take(received);
    } catch (error) {
      this.end(new Error(`what answers is no Redis server: ${(error as Error).message}`, { cause: error }));
    }
    return this.isOpen;
  }

  #answer(reply: unknown): void {
    if (!this.isOpen) return;
    const pending = this.#pending.shift();
    if (pending === undefined) throw new RangeError("the server answered what nobody asked");
    if (reply instanceof ErrorReply) pending.reject(reply);
    else pending.resolve(reply);
  }
}
