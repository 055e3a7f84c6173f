// The check of option names, for every public function: an unknown option raises BadOption with the probable spelling.

import { BadOption } from "./errors.js";
import { near } from "./spelling.js";

/** The names of the options of a type. `satisfies` keeps them complete. */
export type OptionNames<T> = Readonly<Record<keyof T, true>>;

/**
 * Raise BadOption for options that a function does not have.
 *
 * @param what The function.
 * @param options What the user gave.
 * @param known The names of its options.
 * @param needed The options that have no default, as a user writes them.
 */
export function checkOptions(what: string, options: object, known: Readonly<Record<string, true>>, needed = ""): void {
  if (typeof options !== "object" || options === null) {
    throw new BadOption(`the options of ${what} are ${String(options)}, expected an object: ${needed || "{ ... }"}`);
  }
  const wrong = Object.keys(options).filter((name) => !Object.hasOwn(known, name));
  if (wrong.length === 0) return;
  const names = Object.keys(known);
  const told = wrong.map((name) => {
    const meant = near(name, names);
    return meant === "" ? `'${name}'` : `'${name}' (did you mean '${meant}'?)`;
  });
  throw new BadOption(`${what} has no option ${told.join(", ")}: its options are ${names.join(", ")}`);
}
