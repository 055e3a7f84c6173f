// The proof of a received sample in Node: what `chaos/payload.py` does, with the generator of numpy once more.
import { seedWords } from "../js/dist/shuffle/random.js";

/** Index and nonce, little-endian, at the head of `x`. */
const KEY_BYTES = 16;
const WARM_UP = 12;

/**
 * Compare every byte of a received sample with the sample made again. Returns its nonce, or null if it is corrupt.
 *
 * @param {number} seed
 * @param {Uint8Array} x
 * @param {bigint} y
 */
export function prove(seed, x, y) {
  const view = new DataView(x.buffer, x.byteOffset, x.byteLength);
  const [index, nonce] = [view.getBigUint64(0, true), view.getBigUint64(8, true)];
  if (index !== y) return null;
  const body = x.subarray(KEY_BYTES);
  return Buffer.compare(body, sfc64([seed, index, nonce], body.length)) === 0 ? nonce : null;
}

/** Return the first bytes of `numpy.random.SFC64(SeedSequence(entropy))`, computed in halves of 32 bits. */
function sfc64(entropy, length) {
  const seeds = seedWords(entropy, 3).flatMap((word) => [Number(word & 0xffff_ffffn), Number(word >> 32n)]);
  let [al, ah, bl, bh, cl, ch] = seeds;
  let counter = 1;
  const words = new Uint32Array(2 * Math.ceil(length / 8));
  for (let at = -2 * WARM_UP; at < words.length; at += 2) {
    const low = al + bl + counter;
    const high = ah + bh + Math.floor(low / 2 ** 32);
    const [outLow, outHigh] = [low >>> 0, high >>> 0];
    counter += 1;
    al = (bl ^ ((bl >>> 11) | (bh << 21))) >>> 0;
    ah = (bh ^ (bh >>> 11)) >>> 0;
    const sum = cl + ((cl << 3) >>> 0);
    bl = sum >>> 0;
    bh = (ch + (((ch << 3) | (cl >>> 29)) >>> 0) + Math.floor(sum / 2 ** 32)) >>> 0;
    const [turnedLow, turnedHigh] = [((cl << 24) | (ch >>> 8)) >>> 0, ((ch << 24) | (cl >>> 8)) >>> 0];
    const total = turnedLow + outLow;
    cl = total >>> 0;
    ch = (turnedHigh + outHigh + Math.floor(total / 2 ** 32)) >>> 0;
    if (at >= 0) [words[at], words[at + 1]] = [outLow, outHigh];
  }
  return new Uint8Array(words.buffer, 0, length);
}
