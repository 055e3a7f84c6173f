import { createXXHash3 } from "hash-wasm";

const hasher = await createXXHash3(0, 0);

/**
 * Return the XXH3-64 (seed 0) of the concatenated buffers as 16 lowercase hexadecimal digits.
 *
 * @param buffers The buffers, in order.
 * @example
 * digestOf([new Uint8Array([1, 2])]);
 */
export function digestOf(buffers: Iterable<Uint8Array>): string {
  hasher.init();
  for (const buffer of buffers) hasher.update(buffer);
  return hasher.digest("hex");
}
