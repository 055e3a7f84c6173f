// Questions to a server that may be away or silent: the caller waits for a limited time, and a later call gets the
// answer.

import { setTimeout as sleep } from "node:timers/promises";

/** The time for which a reader waits for news that another server has. It reads nothing in this time. */
export const ELSEWHERE_MS = 200;

/** A question that is asked again and again, one at a time. A server that is silent does not hold up who asks. */
export class BackgroundQuery<T> {
  readonly #patienceMs: number | null;
  #asking: Promise<T> | null = null;

  /** @param patienceMs The longest wait for an answer, or null where the caller waits for that server anyway. */
  constructor(patienceMs: number | null) {
    this.#patienceMs = patienceMs;
  }

  /** Return the answer, or null if it takes longer. Then a later call returns it. Raises what the question raised. */
  async ask(question: () => Promise<T>): Promise<T | null> {
    if (this.#patienceMs === null) return await question();
    if (this.#asking === null) {
      this.#asking = question();
      this.#asking.catch(() => {}); // the error is raised where it is awaited
    }
    const answer = await within(this.#asking, this.#patienceMs, () => {
      this.#asking = null;
    });
    return answer === LATE ? null : answer;
  }

  /** Return once no question is under way. */
  async settled(): Promise<void> {
    await this.#asking?.catch(() => {});
  }
}

/** What `within` returns in place of an answer that takes longer. */
export const LATE = Symbol("late");

/** Return the answer, or LATE if it takes longer. `answered` is called at an answer, or at an error, in time. */
export async function within<T>(answer: Promise<T>, ms: number, answered = () => {}): Promise<T | typeof LATE> {
  const limit = new AbortController();
  const late = sleep(ms, LATE, { signal: limit.signal }).catch((): typeof LATE => LATE);
  let isLate = false;
  try {
    const first = await Promise.race([answer, late]);
    isLate = first === LATE;
    return first;
  } finally {
    limit.abort();
    if (!isLate) answered();
  }
}
