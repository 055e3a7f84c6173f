// XXH3-64 with seed 0, in AssemblyScript with SIMD. `src/wire/checksum.ts` drives it.
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md

/** The bytes of input that fit in memory at once: whole blocks. */
const CAPACITY: usize = 65_536;
const BLOCK: usize = 1024;
const STRIPE: usize = 64;

const P32_1: u64 = 0x9e3779b1;
const P32_2: u64 = 0x85ebca77;
const P32_3: u64 = 0xc2b2ae3d;
const P64_1: u64 = 0x9e3779b185ebca87;
const P64_2: u64 = 0xc2b2ae3d27d4eb4f;
const P64_3: u64 = 0x165667b19e3779f9;
const P64_4: u64 = 0x85ebca77c2b2ae63;
const P64_5: u64 = 0x27d4eb2f165667c5;
const MX1: u64 = 0x165667919e3779f9;
const MX2: u64 = 0x9fb21c651e98df25;

const SECRET: usize = memory.data<u8>(
  [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
  ],
  16,
);
const ACC: usize = memory.data(64, 16);
/** The input, behind the last stripe of what was taken before. */
const INPUT: usize = memory.data(64 + 65_536, 64) + 64;

/** Return where the input belongs. */
export function input(): usize {
  return INPUT;
}

/** Return the bytes of input that fit. */
export function capacity(): usize {
  return CAPACITY;
}

/** Begin. */
export function start(): void {
  store<u64>(ACC, P32_3, 0);
  store<u64>(ACC, P64_1, 8);
  store<u64>(ACC, P64_2, 16);
  store<u64>(ACC, P64_3, 24);
  store<u64>(ACC, P64_4, 32);
  store<u64>(ACC, P32_2, 40);
  store<u64>(ACC, P64_5, 48);
  store<u64>(ACC, P32_1, 56);
}

/** Take the whole input. More must follow. */
export function take(): void {
  blocks(CAPACITY / BLOCK);
  memory.copy(INPUT - STRIPE, INPUT + CAPACITY - STRIPE, STRIPE);
}

/**
 * Take the last bytes, and return the digest.
 *
 * @param held The bytes in the input. There are some, unless there never were any.
 * @param total All bytes since `start`.
 */
export function finish(held: usize, total: u64): u64 {
  if (total > 240) return long(held, total);
  if (total > 128) return upTo240(held);
  if (total > 16) return upTo128(held);
  if (total > 8) return upTo16(held);
  if (total > 3) return upTo8(held);
  return total > 0 ? upTo3(held) : avalanche64(load<u64>(SECRET, 56) ^ load<u64>(SECRET, 64));
}

function blocks(count: usize): void {
  for (let block: usize = 0; block < count; block += 1) {
    accumulate(INPUT + block * BLOCK, BLOCK / STRIPE);
    scramble();
  }
}

function accumulate(from: usize, stripes: usize): void {
  let a0 = v128.load(ACC, 0);
  let a1 = v128.load(ACC, 16);
  let a2 = v128.load(ACC, 32);
  let a3 = v128.load(ACC, 48);
  let secret = SECRET;
  for (let end = from + stripes * STRIPE; from < end; from += STRIPE, secret += 8) {
    a0 = mixed(a0, v128.load(from, 0), v128.load(secret, 0));
    a1 = mixed(a1, v128.load(from, 16), v128.load(secret, 16));
    a2 = mixed(a2, v128.load(from, 32), v128.load(secret, 32));
    a3 = mixed(a3, v128.load(from, 48), v128.load(secret, 48));
  }
  v128.store(ACC, a0, 0);
  v128.store(ACC, a1, 16);
  v128.store(ACC, a2, 32);
  v128.store(ACC, a3, 48);
}

// @ts-expect-error AssemblyScript has decorators of functions
@inline
function mixed(acc: v128, data: v128, secret: v128): v128 {
  const key = v128.xor(data, secret);
  const low = v128.shuffle<u32>(key, key, 0, 2, 0, 2);
  const high = v128.shuffle<u32>(key, key, 1, 3, 1, 3);
  const product = i64x2.extmul_low_i32x4_u(low, high);
  return i64x2.add(i64x2.add(acc, v128.shuffle<u64>(data, data, 1, 0)), product);
}

function scramble(): void {
  for (let at: usize = 0; at < STRIPE; at += 8) {
    const acc = load<u64>(ACC + at);
    store<u64>(ACC + at, (acc ^ (acc >> 47) ^ load<u64>(SECRET + 128 + at)) * P32_1);
  }
}

function long(held: usize, total: u64): u64 {
  const count = (held - 1) / BLOCK;
  blocks(count);
  const rest = INPUT + count * BLOCK;
  accumulate(rest, (held - 1 - count * BLOCK) / STRIPE);
  const last = INPUT + held - STRIPE;
  for (let at: usize = 0; at < STRIPE; at += 8) {
    const data = load<u64>(last + at);
    const key = data ^ load<u64>(SECRET + 121 + at);
    store<u64>(ACC + (at ^ 8), load<u64>(ACC + (at ^ 8)) + data);
    store<u64>(ACC + at, load<u64>(ACC + at) + (key & 0xffffffff) * (key >> 32));
  }
  let digest = total * P64_1;
  for (let at: usize = 0; at < STRIPE; at += 16) {
    digest += folded(
      load<u64>(ACC + at) ^ load<u64>(SECRET + 11 + at),
      load<u64>(ACC + at, 8) ^ load<u64>(SECRET + 11 + at, 8),
    );
  }
  return avalanche(digest);
}

function upTo240(length: usize): u64 {
  let digest = (length as u64) * P64_1;
  for (let at: usize = 0; at < 128; at += 16) digest += mix16(at, at);
  digest = avalanche(digest);
  const whole = length & ~15;
  for (let at: usize = 128; at < whole; at += 16) digest += mix16(at, at - 125);
  return avalanche(digest + mix16(length - 16, 119));
}

function upTo128(length: usize): u64 {
  let digest = (length as u64) * P64_1;
  for (let at: usize = 0; at * 2 < length; at += 16) {
    digest += mix16(at, at * 2) + mix16(length - 16 - at, at * 2 + 16);
  }
  return avalanche(digest);
}

function upTo16(length: usize): u64 {
  const low = load<u64>(INPUT) ^ load<u64>(SECRET, 24) ^ load<u64>(SECRET, 32);
  const high = load<u64>(INPUT + length - 8) ^ load<u64>(SECRET, 40) ^ load<u64>(SECRET, 48);
  return avalanche((length as u64) + bswap<u64>(low) + high + folded(low, high));
}

function upTo8(length: usize): u64 {
  const input = (load<u32>(INPUT + length - 4) as u64) + ((load<u32>(INPUT) as u64) << 32);
  let digest = input ^ load<u64>(SECRET, 8) ^ load<u64>(SECRET, 16);
  digest ^= rotl<u64>(digest, 49) ^ rotl<u64>(digest, 24);
  digest *= MX2;
  digest ^= (digest >> 35) + (length as u64);
  digest *= MX2;
  return digest ^ (digest >> 28);
}

function upTo3(length: usize): u64 {
  const first = load<u8>(INPUT) as u64;
  const middle = load<u8>(INPUT + (length >> 1)) as u64;
  const last = load<u8>(INPUT + length - 1) as u64;
  const input = (first << 16) | (middle << 24) | last | ((length as u64) << 8);
  return avalanche64(input ^ (load<u32>(SECRET) as u64) ^ (load<u32>(SECRET, 4) as u64));
}

function mix16(at: usize, secret: usize): u64 {
  return folded(
    load<u64>(INPUT + at) ^ load<u64>(SECRET + secret),
    load<u64>(INPUT + at, 8) ^ load<u64>(SECRET + secret, 8),
  );
}

/** Return the halves of the product of 128 bits, one xor the other. */
function folded(a: u64, b: u64): u64 {
  const a0 = a & 0xffffffff;
  const a1 = a >> 32;
  const b0 = b & 0xffffffff;
  const b1 = b >> 32;
  const carried = ((a0 * b0) >> 32) + a1 * b0;
  const middle = (carried & 0xffffffff) + a0 * b1;
  return (a * b) ^ ((carried >> 32) + (middle >> 32) + a1 * b1);
}

function avalanche(value: u64): u64 {
  const mixed = (value ^ (value >> 37)) * MX1;
  return mixed ^ (mixed >> 32);
}

function avalanche64(value: u64): u64 {
  let mixed = (value ^ (value >> 33)) * P64_2;
  mixed = (mixed ^ (mixed >> 29)) * P64_3;
  return mixed ^ (mixed >> 32);
}
