// The parsing of what a key holds. Contents that Penstock did not write are a DamagedKey.

import { DamagedKey } from "../errors.js";

/** Parse what a key holds: nonsense is a DamagedKey that names the key. */
export function readable<T>(key: string, parse: () => T): T {
  try {
    return parse();
  } catch (error) {
    throw new DamagedKey(`${key} cannot be read: ${(error as Error).message.slice(0, 200)}`, { cause: error });
  }
}

/** Return decimal text as a number. Raises RangeError. */
export function integer(text: string | undefined | null): number {
  const found = text && /^-?[0-9]{1,16}$/.test(text) ? Number(text) : Number.NaN;
  if (!Number.isSafeInteger(found)) throw new RangeError(`${String(text).slice(0, 40)} is no number`);
  return found;
}
