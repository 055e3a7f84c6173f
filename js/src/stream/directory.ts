// The directory of streams: one key that has the names of all streams, so that nobody scans for them. Its names are
// hints, and the meta of a stream is the fact. Older versions neither write nor read it.

import { DamagedKey, ReplyError, Unauthorized } from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { isName, StreamKeys } from "./keys.js";

/** Hash: name of each stream -> its id. */
export const STREAM_NAMES = "penstock:{~streams}:names";

/** Note a stream in the directory. The first one that is noted brings those that older versions made. */
export async function enterStream(server: Server, name: string, id: string): Promise<void> {
  await asAHint(async () => {
    if (textOf(await server.call("HGET", STREAM_NAMES, name)) === id) return;
    const noted = [name, id];
    if (!Number(await server.call("EXISTS", STREAM_NAMES))) {
      for (const other of await scanStreams(server)) {
        const otherId = await idOf(server, other);
        if (other !== name && otherId !== null) noted.push(other, otherId);
      }
    }
    await server.call("HSET", STREAM_NAMES, ...noted);
  });
}

/** Remove a stream from the directory. */
export async function strikeStream(server: Server, name: string): Promise<void> {
  await asAHint(async () => await server.call("HDEL", STREAM_NAMES, name));
}

/** Return the names of all streams of the server, sorted. */
export async function listStreams(server: Server): Promise<string[]> {
  const entered = ((await asAHint(async () => await server.call("HKEYS", STREAM_NAMES))) ?? []) as unknown[];
  const names = entered.map((name) => textOf(name) as string).filter(isName);
  if (names.length === 0) return await scanStreams(server);
  const found: string[] = [];
  for (const name of names) {
    if (Number(await server.call("EXISTS", new StreamKeys(name).meta))) found.push(name);
  }
  return found.sort();
}

/** Return the names of all streams by their meta keys, sorted. It goes through all keys of every server. */
async function scanStreams(server: Server): Promise<string[]> {
  return (await server.onEach(scanServer)).flat().sort();
}

async function scanServer(server: Server): Promise<string[]> {
  const names = new Set<string>();
  let cursor = "0";
  do {
    const [next, keys] = (await server.call("SCAN", cursor, "MATCH", "penstock:{*}:meta", "COUNT", 1000)) as [
      unknown,
      unknown[],
    ];
    cursor = textOf(next) as string;
    for (const key of keys) {
      const name = /^penstock:\{(.*)\}:meta$/.exec(textOf(key) as string)?.[1];
      if (name !== undefined && isName(name)) names.add(name);
    }
  } while (cursor !== "0");
  return [...names];
}

/** Return the id of a stream, or null if its meta is gone or damaged. */
async function idOf(server: Server, name: string): Promise<string | null> {
  return (await asAHint(async () => textOf(await server.call("HGET", new StreamKeys(name).meta, "id")))) ?? null;
}

/** Go on without an answer if another program wrote over a key, or if this user may not use it. */
async function asAHint<T>(ask: () => Promise<T>): Promise<T | undefined> {
  try {
    return await ask();
  } catch (error) {
    if (error instanceof DamagedKey || error instanceof ReplyError || error instanceof Unauthorized) return undefined;
    throw error;
  }
}
