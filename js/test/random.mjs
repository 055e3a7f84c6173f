// Random numbers for tests, the same in every run with one seed. `SEED=2 node --test` is another run.

/** The seed, which the names of tests with random numbers have. */
export const SEED = Number(process.env.SEED ?? 20);

/** Numbers from 0 to 2^32 - 1 (xorshift32). */
export function* numbers(seed = SEED) {
  for (let state = seed; ; yield state >>> 0) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
  }
}

/** Return random bytes. */
export function bytesOf(random, length) {
  const words = Uint32Array.from({ length: Math.ceil(length / 4) }, () => random.next().value);
  return Buffer.from(words.buffer, 0, length);
}

/** Return a random number from 0 on, below 1. */
export function fractionOf(random) {
  return random.next().value / 2 ** 32;
}
