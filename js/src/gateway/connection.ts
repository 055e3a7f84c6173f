// The WebSocket to a gateway: the messages in both directions, credits, acknowledgements, timeouts, and the errors for
// the gateway's codes. `loader.ts` opens the next connection, when `waiting.ts` says so.

import type { Batch } from "../batch.js";
import * as errors from "../errors.js";
import { now, seconds } from "../waiting.js";
import { parseSpec, type Spec } from "../wire/spec.js";
import { readBatch } from "./frames.js";
import type { ChosenGateway, SocketLike } from "./options.js";

const { BadOption, PenstockError, ServerUnavailable, TooLarge, Unauthorized, WaitTimeout } = errors;

/** The gateway's own codes. The others are the names of errors. */
const CODES: Readonly<Record<string, new (text: string) => errors.PenstockError>> = {
  bad_message: BadOption,
  bad_token: Unauthorized,
  foreign_origin: Unauthorized,
  batch_too_large: TooLarge,
};
/** The close code of a message that is too large. */
const TOO_LARGE = 1009;
/** A line for the user about a wait begins with it. */
const WAITING = "waiting: ";
/** How long closing waits until the batches are back in the group. */
const CLOSE_MS = 5000;
/** How long a wait that is over lets messages be handled which came while the page was blocked. */
const GRACE_MS = 50;

/** The facts of a stream, as the gateway tells them. */
export interface Opened {
  readonly spec: Spec;
  readonly stream: string;
  readonly info: Record<string, unknown>;
  readonly member: string;
}

/** What the loop gets: a batch with its number, or the end of an epoch. */
export type GatewayEvent =
  | { readonly type: "batch"; readonly number: number; readonly batch: Batch }
  | { readonly type: "end"; readonly epoch: number | null };

/** Nothing came for `timeoutMs`. The connection is as good as before. */
export class NothingCame extends WaitTimeout {
  override get name(): string {
    return "WaitTimeout";
  }
}

interface Told {
  readonly type: string;
  readonly [name: string]: unknown;
}

/** One connection to a gateway: one member of the group. */
export class GatewayConnection {
  readonly #opened: Promise<Opened>;
  readonly closed: Promise<void>;
  readonly #chosen: ChosenGateway;
  readonly #socket: SocketLike;
  readonly #events: GatewayEvent[] = [];
  readonly #unanswered = new Map<number, { resolve: () => void; reject: (error: Error) => void }>();
  #spec: Spec | null = null;
  #error: Error | null = null;
  /** What the gateway says that it waits for, or "". */
  #waitsFor = "";
  #waiting: (() => void)[] = [];
  /** The samples that were taken and are not acknowledged. */
  unacknowledged = 0;
  #isOpened!: (facts: Opened) => void;
  #hasFailed!: (error: Error) => void;
  #isClosed!: () => void;

  constructor(chosen: ChosenGateway) {
    this.#chosen = chosen;
    this.#opened = new Promise((resolve, reject) => {
      this.#isOpened = resolve;
      this.#hasFailed = reject;
    });
    this.closed = new Promise((resolve) => {
      this.#isClosed = resolve;
    });
    this.#opened.catch(() => {}); // whoever reads is told
    this.#socket = new chosen.WebSocket(chosen.url);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.onopen = () => {
      this.send(chosen.open);
      this.send({ type: "credits", batches: chosen.credits });
    };
    this.#socket.onmessage = ({ data }: { data: ArrayBuffer | string }) => this.#take(data);
    this.#socket.onerror = () => {}; // a close follows
    this.#socket.onclose = ({ code, reason }: { code: number; reason: string }) => {
      this.#fail(
        code === TOO_LARGE
          ? new BadOption("a message of this loader is too large for the gateway: acknowledge fewer batches at once")
          : new ServerUnavailable(
              `the gateway at ${chosen.url} is away (${code}${reason === "" ? "" : `: ${reason}`})`,
            ),
      );
      this.#isClosed();
    };
  }

  send(message: object): void {
    if (this.#error === null) this.#socket.send(JSON.stringify(message));
  }

  /** Return the facts of the stream once the gateway has joined the group. Raises NothingCame. */
  async opened(): Promise<Opened> {
    const began = now();
    while (this.#spec === null && this.#error === null) await this.#change(began);
    return await this.#opened;
  }

  /** Return the next batch, or the end of an epoch. A batch that is taken allows the next one. Raises NothingCame. */
  async next(): Promise<GatewayEvent> {
    const began = now();
    for (;;) {
      const event = this.#events.shift();
      if (event !== undefined) {
        this.#waitsFor = "";
        if (event.type === "batch") {
          this.unacknowledged += event.batch.size;
          this.send({ type: "credits", batches: 1 });
        }
        return event;
      }
      if (this.#error !== null) throw this.#error;
      await this.#change(began);
    }
  }

  /** Return once something came, or the time of a wait that began then is over. Raises NothingCame behind it. */
  async #change(began: number): Promise<void> {
    const { timeoutMs, url } = this.#chosen;
    let timer: ReturnType<typeof setTimeout> | undefined;
    let isOver = false;
    await new Promise<void>((wake) => {
      this.#waiting.push(wake);
      if (timeoutMs === null) return;
      const end = () => {
        isOver = true;
        wake();
      };
      // the timer of a page that was blocked may be due before the messages that came meanwhile
      const allow = () => {
        timer = setTimeout(end, GRACE_MS);
      };
      timer = setTimeout(allow, began + timeoutMs - now());
    });
    clearTimeout(timer);
    if (!isOver) return;
    const why = this.#waitsFor || `the gateway at ${url} sends nothing`;
    throw new NothingCame(`gave up after ${seconds(now() - began)} s: ${why}`);
  }

  /** Acknowledge a batch, and return once Redis has it. Raises the error that ended the connection. */
  async acknowledge(number: number, samples: number): Promise<void> {
    if (this.#error !== null) throw this.#error;
    await new Promise<void>((resolve, reject) => {
      this.#unanswered.set(number, { resolve, reject });
      this.send({ type: "ack", batches: [number] });
    });
    this.unacknowledged -= samples;
  }

  /** Leave the group, and return once what was not acknowledged is back in it. */
  async close(): Promise<void> {
    if (this.#spec === null) return this.abandon(); // it holds nothing, and its socket may be none yet
    this.send({ type: "close" });
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, CLOSE_MS);
    });
    await Promise.race([this.closed, late]);
    clearTimeout(timer);
    this.abandon();
  }

  /** End the connection without a word. */
  abandon(): void {
    this.#fail(new PenstockError("this connection is closed"));
    this.#socket.close();
  }

  #take(data: ArrayBuffer | string): void {
    try {
      if (typeof data === "string") this.#hear(JSON.parse(data) as Told);
      else if (this.#spec !== null) {
        this.#events.push({ type: "batch", ...readBatch(data, this.#spec, this.#chosen.checksum) });
      }
      this.#rouse();
    } catch (error) {
      this.#fail(error as Error);
      this.#socket.close();
    }
  }

  #hear(told: Told): void {
    if (told.type === "opened") {
      this.#spec = parseSpec(told.spec as string);
      this.#isOpened({ ...(told as unknown as Opened), spec: this.#spec });
    } else if (told.type === "end") {
      this.#events.push({ type: "end", epoch: told.epoch as number | null });
    } else if (told.type === "notice") {
      const text = told.text as string;
      if (text.startsWith(WAITING)) this.#waitsFor = text.slice(WAITING.length);
      this.#chosen.notify(text);
    } else if (told.type === "acked") {
      for (const number of told.batches as number[]) {
        this.#unanswered.get(number)?.resolve();
        this.#unanswered.delete(number);
      }
    } else if (told.type === "error") {
      this.#fail(errorOf(told.code as string, told.text as string));
    }
  }

  #fail(error: Error): void {
    this.#error ??= error;
    // batches of a dead connection are handed out again, and so is the end behind them
    if (this.#events[0]?.type === "batch") this.#events.length = 0;
    this.#hasFailed(this.#error);
    for (const { reject } of this.#unanswered.values()) reject(this.#error);
    this.#unanswered.clear();
    this.#rouse();
  }

  #rouse(): void {
    for (const wake of this.#waiting.splice(0)) wake();
  }
}

/** Return the error of a code. What may pass, such as a limit, is ServerUnavailable: the loader tries again. */
function errorOf(code: string, text: string): Error {
  const named = (errors as Record<string, unknown>)[code];
  const known = CODES[code] ?? (typeof named === "function" ? (named as (typeof CODES)[string]) : undefined);
  if (known !== undefined) return new known(text);
  return ["too_many", "too_slow", "failed"].includes(code) ? new ServerUnavailable(text) : new PenstockError(text);
}
