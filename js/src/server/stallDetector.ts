// The stall detector: a timer that reports within 5 s that a server does not answer, and when it answers again.

import type { Lateness, Notify } from "../waiting.js";
import { FIRST_WORD_MS, now, seconds } from "../waiting.js";
import type { Server } from "./client.js";

/** A server that owes an answer for this long is silent: no command waits at it for more than 1 s. */
const SILENCE_MS = 2500;
const REPEAT_MS = 30_000;
const TICK_MS = 250;

/** Says within 5 s that a server does not answer. Whoever asked it cannot say anything meanwhile. */
export class StallDetector implements Lateness {
  readonly #servers: readonly Server[];
  readonly #where: string;
  readonly #notify: Notify;
  readonly #timer: NodeJS.Timeout;
  #told: { readonly at: number; readonly began: number; readonly where: string } | null = null;
  #lateAt = Number.NEGATIVE_INFINITY;
  #lookedAt = now();
  /** Since when this process answers, too: a step that computes for long reads no answers. */
  #awakeSince = Number.NEGATIVE_INFINITY;

  /** @param where The address, without a password. Of a cluster, the silent server is named instead. */
  constructor(servers: readonly Server[], where: string, notify: Notify) {
    this.#servers = servers;
    this.#where = where;
    this.#notify = notify;
    this.#timer = setInterval(() => this.#look(), TICK_MS);
    this.#timer.unref();
  }

  /** Return whether the server owes an answer, or owed one a moment ago. */
  get isLate(): boolean {
    return this.#silent.ms >= SILENCE_MS || now() - this.#lateAt < FIRST_WORD_MS;
  }

  stop(): void {
    clearInterval(this.#timer);
  }

  get #silent(): { readonly ms: number; readonly where: string } {
    const found = this.#servers.map(({ silence }) => silence);
    const { ms, where } = found.reduce((longest, one) => (one.ms > longest.ms ? one : longest));
    return { ms: Math.min(ms, now() - this.#awakeSince), where: where || this.#where };
  }

  #look(): void {
    if (now() - this.#lookedAt > 4 * TICK_MS) this.#awakeSince = now();
    this.#lookedAt = now();
    const { ms: silentMs, where } = this.#silent;
    if (silentMs >= SILENCE_MS) {
      this.#lateAt = now();
      if (this.#told !== null && now() - this.#told.at < REPEAT_MS) return;
      this.#told = { at: now(), began: this.#told?.began ?? now() - silentMs, where };
      const said = silentMs >= 10_000 ? seconds(silentMs) : (silentMs / 1000).toFixed(1);
      this.#notify(`waiting: no answer from ${where} for ${said} s: is it stopped, overloaded or cut off?`);
    } else if (this.#told !== null) {
      this.#notify(`${this.#told.where} answers again, after ${seconds(now() - this.#told.began)} s`);
      this.#told = null;
    }
  }
}
