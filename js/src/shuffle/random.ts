// The random numbers of numpy, so that a seed shuffles alike in both languages: SeedSequence, Philox4x64-10 and
// Generator.choice. Of these it has the part that a shuffle window uses.

const MASK = 0xffff_ffff_ffff_ffffn;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n] as const;
const WEYL = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn] as const;
const ROUNDS = 10;

/** The bit generator `numpy.random.Philox`. */
export class Philox {
  readonly #key: readonly [bigint, bigint];
  #counter = 0n;
  #words: bigint[] = [];
  #half: number | null = null;

  constructor(key: readonly [bigint, bigint]) {
    this.#key = key;
  }

  /** Return 64 random bits. */
  next64(): bigint {
    if (this.#words.length === 0) this.#words = this.#block();
    return this.#words.shift() as bigint;
  }

  /** Return 32 random bits. Each 64 give two, the lower ones first. */
  next32(): number {
    if (this.#half !== null) {
      const half = this.#half;
      this.#half = null;
      return half;
    }
    const word = this.next64();
    this.#half = Number(word >> 32n);
    return Number(word & 0xffff_ffffn);
  }

  /** Return an integer from 0 to `top`, below 2^32 - 1, by Lemire's method. */
  upTo(top: number): number {
    if (top === 0) return 0;
    const range = top + 1;
    const limit = (0xffff_ffff - top) % range;
    for (;;) {
      const product = BigInt(this.next32()) * BigInt(range);
      if (Number(product & 0xffff_ffffn) >= limit) return Number(product >> 32n);
    }
  }

  #block(): bigint[] {
    this.#counter += 1n;
    const word = (at: bigint) => (this.#counter >> (64n * at)) & MASK;
    let [c0, c1, c2, c3] = [word(0n), word(1n), word(2n), word(3n)];
    let [k0, k1] = this.#key;
    for (let round = 0; round < ROUNDS; round += 1) {
      if (round > 0) [k0, k1] = [(k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK];
      const p0 = MULTIPLIERS[0] * c0;
      const p1 = MULTIPLIERS[1] * c2;
      [c0, c1, c2, c3] = [(p1 >> 64n) ^ c1 ^ k0, p1 & MASK, (p0 >> 64n) ^ c3 ^ k1, p0 & MASK];
    }
    return [c0, c1, c2, c3];
  }
}

const POOL = 4;

/** Return the 64-bit words of `numpy.random.SeedSequence(entropy).generate_state(count, uint64)`. */
export function seedWords(entropy: readonly (number | bigint)[], count: number): bigint[] {
  const words = entropy.flatMap(uint32s);
  let constant = 0x43b0d7e5;
  const hash = (value: number) => {
    let mixed = (value ^ constant) >>> 0;
    constant = Math.imul(constant, 0x931e8875) >>> 0;
    mixed = Math.imul(mixed, constant) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  };
  const mix = (x: number, y: number) => {
    const mixed = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: POOL }, (_, at) => hash(words[at] ?? 0));
  for (let from = 0; from < POOL; from += 1) {
    for (let to = 0; to < POOL; to += 1) {
      if (from !== to) pool[to] = mix(pool[to] as number, hash(pool[from] as number));
    }
  }
  for (const word of words.slice(POOL)) {
    for (let to = 0; to < POOL; to += 1) pool[to] = mix(pool[to] as number, hash(word));
  }
  constant = 0x8b51f9dd;
  const state = Array.from({ length: 2 * count }, (_, at) => {
    let mixed = ((pool[at % POOL] as number) ^ constant) >>> 0;
    constant = Math.imul(constant, 0x58f38ded) >>> 0;
    mixed = Math.imul(mixed, constant) >>> 0;
    return BigInt((mixed ^ (mixed >>> 16)) >>> 0);
  });
  return Array.from({ length: count }, (_, at) => (state[2 * at] as bigint) | ((state[2 * at + 1] as bigint) << 32n));
}

function uint32s(value: number | bigint): number[] {
  const words: number[] = [];
  let rest = BigInt(value);
  do {
    words.push(Number(rest & 0xffff_ffffn));
    rest >>= 32n;
  } while (rest > 0n);
  return words;
}

/** Return `size` different integers below `population`, as `Generator(bits).choice(population, size, replace=False)`. */
export function choice(bits: Philox, population: number, size: number): number[] {
  if (population > 10_000 && size > Math.floor(population / 50)) {
    const all = Array.from({ length: population }, (_, at) => at);
    shuffleTail(bits, all, Math.max(population - size, 1));
    return all.slice(population - size);
  }
  const found: number[] = [];
  const taken = new Set<number>();
  for (let top = population - size; top < population; top += 1) {
    const drawn = bits.upTo(top);
    const one = taken.has(drawn) ? top : drawn;
    taken.add(one);
    found.push(one);
  }
  shuffleTail(bits, found, 1);
  return found;
}

function shuffleTail(bits: Philox, values: number[], first: number): void {
  for (let at = values.length - 1; at >= first; at -= 1) {
    const other = bits.upTo(at);
    [values[at], values[other]] = [values[other] as number, values[at] as number];
  }
}
