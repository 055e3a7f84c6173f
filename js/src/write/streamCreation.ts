// Creates streams and changes their settings: the fields of the meta and their defaults, and the spec that is fixed.

import { randomBytes } from "node:crypto";
import { StreamConflict, StreamDeleted } from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { enterStream, strikeStream } from "../stream/directory.js";
import { AUTO } from "../stream/durability.js";
import { announce } from "../stream/events.js";
import { StreamKeys } from "../stream/keys.js";
import { fieldsOfLevel, findStream, loadStream, requireThere, type Stream } from "../stream/stream.js";
import { parseSpec, type Spec } from "../wire/spec.js";
import { chooseTags, usualPartitions } from "./placement.js";
import { isSameSpec, specJson, toldSpec } from "./spec.js";

/** The payload that a stream may hold where nobody names its budget. */
export const BUDGET_BYTES = 2 ** 30;
/** The payload of an entry where the stream names none. */
export const BLOCK_BYTES = 1_000_000;
const MAX_PARTITIONS = 256;

/** The settings of a stream. What is undefined keeps the existing or default value. */
export interface Settings {
  readonly spec?: Spec | undefined;
  readonly partitions?: number | undefined;
  readonly budgetBytes?: number | undefined;
  readonly blockBytes?: number | undefined;
  readonly retention?: string | undefined;
  readonly durability?: string | undefined;
  readonly info?: Readonly<Record<string, unknown>> | undefined;
}

/** Make the stream, or return it if it exists with the same settings. Raises StreamConflict or StreamDeleted. */
export async function createStream(server: Server, name: string, settings: Settings): Promise<Stream> {
  const stream = (await findStream(server, name)) ?? (await made(server, name, settings));
  const { spec, partitions, budgetBytes, retention, durability, info } = settings;
  if (partitions !== undefined && partitions !== stream.partitions.length) {
    throw new StreamConflict(
      `stream '${name}' has ${stream.partitions.length} partitions, ${partitions} asked for: leave partitions out, or ` +
        "use another name",
    );
  }
  const wanted = {
    budget_bytes: budgetBytes,
    retention,
    ...(durability === undefined || durability === stream.durability ? {} : fieldsOfLevel(durability)),
    info: info && JSON.stringify({ ...stream.info, ...info }),
  };
  for (const [field, value] of Object.entries(wanted)) {
    if (value === undefined) continue;
    const answer = await server.run("set_stream_field", [stream.keys.meta], [stream.id, field, value]);
    if (Number(answer) < 0) throw await deleted(server, stream);
  }
  if (spec !== undefined) await fixSpec(server, stream, spec);
  await enterStream(server, name, stream.id);
  try {
    await requireThere(server, stream);
  } catch (error) {
    if (error instanceof StreamDeleted) await strikeStream(server, name);
    throw error;
  }
  return await loadStream(server, name);
}

async function made(server: Server, name: string, settings: Settings): Promise<Stream> {
  const { spec, budgetBytes = BUDGET_BYTES, blockBytes = BLOCK_BYTES } = settings;
  const servers = server.slots;
  const partitions = settings.partitions ?? usualPartitions(servers.length, budgetBytes);
  const keys = new StreamKeys(name);
  const id = randomBytes(6).toString("hex");
  if (!(partitions >= 1 && partitions <= MAX_PARTITIONS)) {
    throw new StreamConflict(
      `stream '${name}': ${partitions} partitions asked for, 1 to ${MAX_PARTITIONS} are possible`,
    );
  }
  const fields = {
    v: 1,
    tags: JSON.stringify(chooseTags(name, id, partitions, servers)),
    spec: spec === undefined ? "" : specJson(spec),
    partitions,
    budget_bytes: budgetBytes,
    block_bytes: blockBytes,
    retention: settings.retention ?? "budget",
    ...fieldsOfLevel(settings.durability ?? AUTO),
    payload: "inline",
    info: JSON.stringify(settings.info ?? {}),
    created_ms: Date.now(),
    id,
  };
  // the fields of the first one, all of them: no reader sees half a stream
  const commands = Object.entries(fields).map(([field, value]) => ["HSETNX", keys.meta, field, value]);
  const outcome = (await server.sequence([["MULTI"], ...commands, ["EXEC"]])).at(-1);
  if (outcome instanceof Error) throw outcome;
  const isOurs = (outcome as unknown[]).every((one) => Number(one) === 1);
  if (isOurs || !Number(await server.call("EXISTS", keys.events))) await announce(server, keys, "created", name);
  return await loadStream(server, name);
}

/** Make this the stream's spec if it has none, and return it. Raises StreamConflict if it has another. */
export async function fixSpec(server: Server, stream: Stream, spec: Spec): Promise<Spec> {
  const text = specJson(spec);
  const known = await server.run("fix_spec", [stream.keys.meta], [stream.id, text]);
  if (Number(known) === -1) throw await deleted(server, stream);
  const found = textOf(known) as string;
  if (found === text) await announce(server, stream.keys, "spec", "");
  const fixed = parseSpec(found);
  if (isSameSpec(fixed, spec)) return fixed;
  throw new StreamConflict(
    `stream '${stream.name}' holds samples of another spec, (${toldSpec(fixed)}), found (${toldSpec(spec)}): write to ` +
      `a stream of another name, or remove this one first (\`penstock delete ${stream.name}\`); it takes ` +
      `spec: ${specJson(fixed)}`,
  );
}

/** Return the error for a stream that was deleted, even if it was made again. */
export async function deleted(server: Server, { name, id }: Stream): Promise<StreamDeleted> {
  const again = await findStream(server, name);
  if (again?.id === id) {
    return new StreamDeleted(
      `stream '${name}' is being deleted; if that was interrupted, \`penstock delete ${name}\` again`,
    );
  }
  const anew = again === null ? "" : "; another one of that name was made since";
  return new StreamDeleted(
    `stream '${name}' was deleted, or the server lost its data (emptied, or restarted without it)${anew}: start again ` +
      "to use it anew",
  );
}

/** Raise StreamDeleted if the stream was deleted, and then remove the keys that the caller just made. */
export async function requireKept(server: Server, stream: Stream, keys: readonly string[]): Promise<void> {
  const [found, deleting] = ((await server.call("HMGET", stream.keys.meta, "id", "deleting")) as unknown[]).map(textOf);
  if (found === stream.id && deleting === null) return;
  if (found !== stream.id) {
    // an unfinished deletion removes them itself, and a stream that was made again owns those without an id
    const own = keys.filter((key) => key.includes(stream.id));
    await Promise.all(own.map((key) => server.call("UNLINK", key)));
    const named = keys.filter((key) => !key.includes(stream.id));
    await server.run("unlink_named", [stream.keys.meta, ...named], [stream.id]);
  }
  throw await deleted(server, stream);
}
