import { BadOption } from "./errors.js";

/** Return an option that is an integer of at least `least`. Raises BadOption. */
export function whole(name: string, value: number, least: number): number {
  if (Number.isSafeInteger(value) && value >= least) return value;
  throw new BadOption(`${name} is ${value}, expected an integer of at least ${least}`);
}
