// The events of a stream, in its events key: announcing a change, and waiting for one. An event is a hint, and may be
// lost.

import { setTimeout as sleep } from "node:timers/promises";
import { DamagedKey, ReplyError } from "../errors.js";
import { entriesOf, type Server, textOf } from "../server/client.js";
import type { BlockingConnection } from "./blockingConnection.js";
import type { StreamKeys } from "./keys.js";

const EVENTS_KEPT = 256;
/** The pause between two looks while the events key is damaged. */
const DAMAGED_PAUSE_MS = 100;

/** Return the id of the newest event. Read it before the state and give it to `awaitEvent`, to miss no event. */
export async function lastEvent(server: Server, keys: StreamKeys): Promise<string> {
  try {
    const found = entriesOf(await server.call("XREVRANGE", keys.events, "+", "-", "COUNT", 1));
    return textOf(found[0]?.[0]) ?? "0-0";
  } catch (error) {
    if (error instanceof DamagedKey) return "0-0"; // `awaitEvent` knows what to do then
    throw error;
  }
}

/** Wait for an event after `after`, at most `blockMs`. An event is a hint only. */
export async function awaitEvent(
  connection: BlockingConnection,
  keys: StreamKeys,
  after: string,
  blockMs: number,
): Promise<void> {
  try {
    await connection.call(blockMs, ["XREAD", "COUNT", 1], ["STREAMS", keys.events, after]);
  } catch (error) {
    if (!(error instanceof DamagedKey)) throw error;
    await sleep(Math.min(blockMs, DAMAGED_PAUSE_MS));
  }
}

/** Wake all that wait for a change of this stream. An event is a hint only. */
export async function announce(server: Server, keys: StreamKeys, what: string, value: string | number): Promise<void> {
  // nothing is announced of a stream that was deleted: its events must not come back
  const only = what === "created" ? [] : ["NOMKSTREAM"];
  try {
    await server.call("XADD", keys.events, ...only, "MAXLEN", "~", EVENTS_KEPT, "*", what, String(value));
  } catch (error) {
    // the key is no stream any more, or no id is left in it: waits look without hints
    if (!(error instanceof DamagedKey || error instanceof ReplyError)) throw error;
  }
}
