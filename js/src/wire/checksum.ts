// The checksum of a payload: XXH3-64 as 16 hexadecimal digits, computed in WebAssembly.

import { XXH3 } from "./xxh3Wasm.js";

/** The exports of `wasm/xxh3.ts`. */
interface Xxh3 {
  readonly memory: WebAssembly.Memory;
  input(): number;
  capacity(): number;
  start(): void;
  take(): void;
  finish(held: number, total: bigint): bigint;
}

const code = new WebAssembly.Module(Uint8Array.from(atob(XXH3), (letter) => letter.charCodeAt(0)));
const xxh3 = new WebAssembly.Instance(code).exports as unknown as Xxh3;
const input = new Uint8Array(xxh3.memory.buffer, xxh3.input(), xxh3.capacity());

/**
 * Return the XXH3-64 (seed 0) of the concatenated buffers as 16 lowercase hexadecimal digits.
 *
 * @param buffers The buffers, in order.
 * @example
 * digestOf([new Uint8Array([1, 2])]);
 */
export function digestOf(buffers: Iterable<Uint8Array>): string {
  xxh3.start();
  let [held, total] = [0, 0];
  for (const buffer of buffers) {
    for (let at = 0; at < buffer.length; ) {
      if (held === input.length) {
        xxh3.take();
        held = 0;
      }
      const end = Math.min(buffer.length, at + input.length - held);
      input.set(buffer.subarray(at, end), held);
      held += end - at;
      total += end - at;
      at = end;
    }
  }
  const digest = BigInt.asUintN(64, xxh3.finish(held, BigInt(total)));
  return digest.toString(16).padStart(16, "0");
}
