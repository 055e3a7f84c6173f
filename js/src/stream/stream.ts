// The meta of a stream: its settings, its counters of epochs, and the errors for a stream that is missing or deleted.

import { DamagedKey, StreamDeleted, StreamNotFound } from "../errors.js";
import { hashOf, type Server, textOf } from "../server/client.js";
import { near } from "../spelling.js";
import { STREAM_ID } from "../wire/header.js";
import { parseSpec, type Spec } from "../wire/spec.js";
import { integer, readable } from "./damage.js";
import { listStreams } from "./directory.js";
import { AUTO } from "./durability.js";
import { checkedName, isTag, PartitionKeys, StreamKeys } from "./keys.js";
import { parseRanges, type Range } from "./ranges.js";

/** The settings of a stream. */
export interface Stream {
  readonly name: string;
  /** A random id, which differs when a stream is made again under the same name. */
  readonly id: string;
  /** The tensors of a sample. Null until the first sample fixes them. */
  readonly spec: Spec | null;
  readonly partitions: readonly PartitionKeys[];
  readonly budgetBytes: number;
  readonly blockBytes: number;
  /** `inline`, or `segments:` and a folder. */
  readonly payload: string;
  /** What must have happened to a write. See `Durability`. */
  readonly durability: string;
  /** The producer's facts, such as the names of classes. */
  readonly info: Record<string, unknown>;
  readonly keys: StreamKeys;
}

/** Return the partition of a shard: shard s belongs to partition s mod P. */
export function partitionOf(stream: Stream, shard: number): PartitionKeys {
  return stream.partitions[shard % stream.partitions.length] as PartitionKeys;
}

/** Return the stream, or null if there is none of that name. Raises DamagedKey. */
export async function findStream(server: Server, name: string): Promise<Stream | null> {
  const keys = new StreamKeys(checkedName("stream", name));
  const meta = hashOf(await server.call("HGETALL", keys.meta));
  if (!meta.has("id")) return null;
  return readable(keys.meta, () => {
    const id = meta.get("id") as string;
    if (!STREAM_ID.test(id)) throw new RangeError(`id is ${id.slice(0, 40)}`);
    const tags = JSON.parse(meta.get("tags") as string);
    if (!Array.isArray(tags) || tags.length === 0 || !tags.every(isTag))
      throw new RangeError("tags is not a list of tags");
    const spec = meta.get("spec");
    return {
      name,
      id,
      spec: spec ? parseSpec(spec) : null,
      partitions: tags.map((tag, number) => new PartitionKeys(name, tag, number)),
      budgetBytes: integer(meta.get("budget_bytes")),
      blockBytes: integer(meta.get("block_bytes")),
      payload: meta.get("payload") ?? "inline",
      durability: levelIn(meta),
      info: JSON.parse(meta.get("info") ?? "{}"),
      keys,
    };
  });
}

/** Return the durability. An earlier version would refuse the word `auto`, so it is in a field that it does not read. */
function levelIn(meta: ReadonlyMap<string, string>): string {
  const level = meta.get("durability") ?? "memory";
  return level === "memory" && meta.get("replicas") === AUTO ? AUTO : level;
}

/** Return the fields that store a durability, in the order in which they are set. */
export function fieldsOfLevel(level: string): Record<string, string> {
  return level === AUTO ? { replicas: AUTO, durability: "memory" } : { durability: level, replicas: "" };
}

/** Return the stream. Raises StreamNotFound. */
export async function loadStream(server: Server, name: string): Promise<Stream> {
  const stream = await findStream(server, name);
  if (stream !== null) return stream;
  throw new StreamNotFound(await absence(server, name));
}

/** Return the spec of a stream that has samples. Raises DamagedKey. */
export function requireSpec(stream: Stream): Spec {
  if (stream.spec !== null) return stream.spec;
  throw new DamagedKey(`${stream.keys.meta} has no \`spec\`, which the first sample fixes: no sample was written yet`);
}

/** Return a sentence on a missing stream. */
export async function absence(server: Server, name: string): Promise<string> {
  const names = await listStreams(server);
  const meant = near(name, names);
  const more = names.length > 10 ? ` and ${names.length - 10} more` : "";
  const there =
    names.length > 0 ? `streams there: ${names.slice(0, 10).join(", ")}${more}` : "the server has no streams yet";
  const hint = meant ? `did you mean '${meant}'?` : "start a producer (`penstock produce`) or check name and URL";
  return `no stream '${name}'; ${there}; ${hint}`;
}

/** What the stream's meta says of its epochs. */
export interface Counters {
  /** The number of the next epoch. */
  readonly next: number;
  /** The planned number of epochs, or null. */
  readonly final: number | null;
  /** The first epoch that was not released, counted from 0 without a gap. */
  readonly floor: number;
  /** Ranges of the released epochs. */
  readonly released: readonly Range[];
}

/** Return the counters of the stream's epochs. Raises DamagedKey. */
export async function readCounters(server: Server, stream: Stream): Promise<Counters> {
  const { meta } = stream.keys;
  const reply = (await server.call("HMGET", meta, "next_epoch", "final", "released")) as unknown[];
  const [next, final, released] = reply.map(textOf);
  return readable(meta, () => {
    const gone = parseRanges(released ?? "");
    const [first] = gone;
    return {
      next: integer(next ?? "0"),
      final: final === null || final === undefined ? null : integer(final),
      floor: first?.[0] === 0 ? first[1] + 1 : 0,
      released: gone,
    };
  });
}

/** Raise StreamDeleted if the stream was deleted. */
export async function requireThere(server: Server, stream: Stream): Promise<void> {
  const [id, deleting] = (await server.call("HMGET", stream.keys.meta, "id", "deleting")) as unknown[];
  if (textOf(id) === stream.id && textOf(deleting) === null) return;
  throw new StreamDeleted(
    `stream '${stream.name}' was deleted, or the server lost its data (emptied, or restarted without it): ` +
      "start again to use it",
  );
}
