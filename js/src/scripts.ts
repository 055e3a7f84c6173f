// Loads the Lua scripts, which Python ships, too: one `.lua` file each in `dist/scripts`, sent without the comments on
// top.

import { readFileSync } from "node:fs";

const NAME = /^[a-z_]+$/;

/**
 * Return a Lua script as it is sent to the server: without the comments on top of its file. Python ships the same files.
 *
 * @param name The name of the file in `dist/scripts`, without `.lua`.
 * @throws RangeError if there is no such script.
 * @example
 * const lines = loadScript("forget_manifest").split("\n");
 */
export function loadScript(name: string): string {
  if (!NAME.test(name)) throw new RangeError(`${JSON.stringify(name)} is not the name of a script`);
  let text: string;
  try {
    text = readFileSync(new URL(`./scripts/${name}.lua`, import.meta.url), "utf8");
  } catch (error) {
    throw new RangeError(`there is no script ${name}`, { cause: error });
  }
  return text.replace(/^(?:--.*\n)*\n*/, "");
}
