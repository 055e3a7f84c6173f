// Waits that explain themselves, and outages: when a line is due, how long a lost server is waited for, and the default
// of `notify`.

import { ServerUnavailable, WaitTimeout } from "./errors.js";
import { printable } from "./printable.js";

/** Takes one line for the user. */
export type Notify = (line: string) => void;

/** The time after which a wait says what it waits for. */
export const FIRST_WORD_MS = 3000;
const REPEAT_MS = 30_000;
/** The time for which a request to a lost server is repeated. It outlasts a restart, or a minute of silence. */
export const OUTAGE_MS = 60_000;
const FIRST_PAUSE_MS = 20;
const BETWEEN_TRIES_MS = 500;

function sleep(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Write a line to stderr, or to the console of a browser. This is the default of `notify`. */
export function toStderr(line: string): void {
  const text = `penstock: ${printable(line)}`;
  if (typeof process === "undefined") console.warn(text);
  else process.stderr.write(`${text}\n`);
}

/** Return a clock in milliseconds that no one sets. */
export function now(): number {
  return performance.now();
}

/** Tells whether the server owes an answer. Its facts explain no wait then. */
export interface Lateness {
  readonly isLate: boolean;
}

/** How one wait is reported. */
export interface WaitTurn {
  /** The longest wait. It replaces the limit of the wait. */
  readonly limitMs?: number | null;
  /** The time of the first line: 0 if the wait is probably a mistake. */
  readonly firstWordMs?: number;
}

/** One wait, which explains itself. Call `because` in each turn of the loop. */
export class Wait {
  readonly #notify: Notify;
  readonly #limitMs: number | null;
  readonly #server: Lateness;
  readonly #began = now();
  #told: { at: number; kind: string } | null = null;

  /**
   * @param notify Takes the lines.
   * @param limitMs The longest wait, or null.
   * @param server The server that knows whether the wait is over. While it is late, `StallDetector` says so.
   */
  constructor(notify: Notify, limitMs: number | null, server: Lateness = { isLate: false }) {
    this.#notify = notify;
    this.#limitMs = limitMs;
    this.#server = server;
  }

  get ms(): number {
    return now() - this.#began;
  }

  /** Say why this waits, if a line is due. Raises WaitTimeout with the same reason. */
  async because(kind: string, reason: () => string | Promise<string>, turn: WaitTurn = {}): Promise<void> {
    const limitMs = turn.limitMs ?? this.#limitMs;
    if (limitMs !== null && this.ms >= limitMs) {
      throw new WaitTimeout(`gave up after ${seconds(this.ms)} s: ${await reason()}`);
    }
    const quietMs = now() - (this.#told?.at ?? this.#began);
    const dueMs = this.#told === null ? (turn.firstWordMs ?? FIRST_WORD_MS) : REPEAT_MS;
    const isNews = this.#told !== null && this.#told.kind !== kind && quietMs >= FIRST_WORD_MS;
    if (!(quietMs >= dueMs || isNews) || this.#server.isLate) return;
    const text = await reason();
    if (this.#server.isLate) return;
    this.#told = { at: now(), kind };
    this.#notify(`waiting: ${text}`);
  }
}

/** One outage: when it began, and the pause before the next try. */
interface Trouble {
  began: number | null;
  pauseMs: number;
}

/** A server that is away. It is reported, waited for until a limit, and then raised as an error. */
export class Outage {
  readonly #notify: Notify;
  readonly #doing: string;
  /** The limit. A process that ends makes it shorter. */
  patienceMs: number;
  readonly #trouble: Trouble = { began: null, pauseMs: 0 };
  #toldAt: number | null = null;
  /** The calls of `through` that fail now. */
  #failing = 0;

  /**
   * @param notify Takes the lines.
   * @param doing What the server is needed for, as in "reading".
   * @param patienceMs The longest wait.
   */
  constructor(notify: Notify, doing: string, patienceMs = OUTAGE_MS) {
    this.#notify = notify;
    this.#doing = doing;
    this.patienceMs = patienceMs;
  }

  /** Wait after a failure until it is time to try again. Raises the error once the outage lasts too long. */
  async bear(error: ServerUnavailable): Promise<void> {
    await this.#bear(error, this.#trouble);
  }

  async #bear(error: ServerUnavailable, trouble: Trouble): Promise<void> {
    if (error.isFinal) throw error;
    const isLoading = error.message.startsWith("LOADING"); // such a server lives
    if (trouble.began === null || isLoading) trouble.began = now();
    if (now() - trouble.began > this.patienceMs) throw error;
    if (this.#toldAt === null || now() - this.#toldAt >= REPEAT_MS) {
      this.#toldAt = now();
      const tries = `trying again for ${seconds(this.patienceMs)} s`;
      this.#notify(
        isLoading
          ? `waiting, to go on ${this.#doing}: ${error.message}`
          : `${error.isSaid ? "the server refused" : "the connection broke"} while ${this.#doing} (${error.message}); ${tries}`,
      );
    }
    await sleep(trouble.pauseMs);
    trouble.pauseMs = Math.min(Math.max(FIRST_PAUSE_MS, 2 * trouble.pauseMs), BETWEEN_TRIES_MS);
  }

  /** Do something again while its server is away. It must be safe to repeat. An answer of another server ends nothing. */
  async through<T>(act: () => Promise<T>): Promise<T> {
    const trouble: Trouble = { began: null, pauseMs: 0 };
    try {
      for (;;) {
        try {
          return await act();
        } catch (error) {
          if (!(error instanceof ServerUnavailable)) throw error;
          if (trouble.began === null) this.#failing += 1;
          await this.#bear(error, trouble);
        }
      }
    } finally {
      if (trouble.began !== null) this.#failing -= 1;
      if (trouble.began !== null && this.#failing === 0) this.#toldAt = null;
    }
  }

  /** Note that the server answered. */
  over(): void {
    this.#trouble.began = this.#toldAt = null;
    this.#trouble.pauseMs = 0;
  }
}

/** Return milliseconds as whole seconds, in words for people. */
export function seconds(ms: number): string {
  return (ms / 1000).toFixed(0);
}
