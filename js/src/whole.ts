// The check of an option that must be an integer of at least a given value.

import { BadOption } from "./errors.js";

/** Return an option that is an integer of at least `least`. Raises BadOption. */
export function whole(name: string, value: number, least: number): number {
  if (Number.isSafeInteger(value) && value >= least) return value;
  const found = typeof value === "string" ? `'${value}'` : String(value);
  throw new BadOption(`${name} is ${found}, expected an integer of at least ${least}`);
}
