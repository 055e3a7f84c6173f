// The wait for a change of a stream, by its events key. An event is a hint, and may be lost. `write/streamCreation.ts`
// announces events.

import { setTimeout as sleep } from "node:timers/promises";
import { DamagedKey } from "../errors.js";
import { entriesOf, type Server, textOf } from "../server/client.js";
import type { BlockingConnection } from "./blockingConnection.js";
import type { StreamKeys } from "./keys.js";

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
