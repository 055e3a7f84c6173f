// The commands that commit a block, the commands that read how far a shard is committed, and the parsing of their
// answers.

import { PenstockError, ServerUnavailable } from "../errors.js";
import { loadScript } from "../scripts.js";
import { type Argument, entriesOf, type Server, textOf, translated } from "../server/client.js";
import { integer, readable } from "../stream/damage.js";
import type { PartitionKeys } from "../stream/keys.js";
import { liveState, type Manifest } from "../stream/manifest.js";
import type { PackedBlock } from "./block.js";

/** The script is sent in full: a digest that the server forgot would fail in EXEC and leave an unindexed entry. */
const COMMIT = Buffer.from(loadScript("commit"));

/** A shard's progress as its writer finds it. */
export interface Progress {
  /** All offsets below it are committed. */
  readonly end: number;
  /** The epoch's state in this partition, or "". */
  readonly state: string;
  /** The payload bytes that the partition holds. */
  readonly heldBytes: number;
  /** The token in the shard's newest record, or null while the shard has no record. */
  readonly writer: string | null;
}

/** One shard of one epoch, as commands name it. */
export interface ShardPlace {
  readonly partition: PartitionKeys;
  readonly manifest: Manifest;
  readonly shard: number;
}

/** Read how far a shard is. Raises the errors of this package. */
export async function look(server: Server, place: ShardPlace): Promise<Progress> {
  return (await lookAndAsk(server, place, []))[0];
}

/** Do the same, and send further commands behind it. Returns their answers, too. */
export async function lookAndAsk(
  server: Server,
  { partition, manifest, shard }: ShardPlace,
  further: readonly (readonly Argument[])[],
): Promise<[Progress, unknown[]]> {
  const { epoch } = manifest;
  const index = partition.index(epoch, shard);
  const looks: Argument[][] = [
    ["XREVRANGE", index, "+", "-", "COUNT", 1],
    ["GET", partition.state(epoch)],
    ["HGET", partition.roster, "bytes"],
  ];
  const all = await server.sequence([...looks, ...further]);
  const replies = all.slice(0, looks.length);
  raiseErrors(replies);
  const [newest, state, held] = [entriesOf(replies[0])[0], textOf(replies[1]) ?? "", textOf(replies[2]) ?? "0"];
  const progress = readable(`${index} or ${partition.roster}`, () => {
    const heldBytes = integer(held);
    if (newest === undefined) return { end: 0, state, heldBytes, writer: null };
    const [id, fields] = newest;
    let writer = "";
    for (let at = 0; at + 1 < fields.length; at += 2) if (String(fields[at]) === "w") writer = String(fields[at + 1]);
    return { end: endOf(String(id)), state, heldBytes, writer };
  });
  return [progress, all.slice(looks.length)];
}

function endOf(recordId: string): number {
  return integer(recordId.split("-")[0]);
}

/**
 * Return the commands that commit one block. `readCommit` takes the answer of the script, the last of EXEC's.
 *
 * A block of holes alone is sent as the script without a MULTI: it appends no entry, and at maxmemory a MULTI is refused.
 *
 * @param fields The fields of the entry. None for a block of holes alone.
 * @param bad The reason for each hole.
 * @param writer The token of a feed's writer.
 */
export function commitCommands(
  { partition, manifest, shard }: ShardPlace,
  block: PackedBlock,
  fields: readonly (readonly [string, Uint8Array])[],
  bad: ReadonlyMap<number, string>,
  writer: string,
): Argument[][] {
  const { epoch } = manifest;
  const entries = partition.entries(epoch);
  const keys = [entries, partition.index(epoch, shard), partition.roster, partition.state(epoch)];
  keys.push(partition.quarantine(epoch));
  const { end, first, count, bytes, holes } = block;
  const numbers = [epoch, end, first, count, bytes];
  const noted = [...bad].flatMap(([offset, why]) => [`${shard}:${offset}`, JSON.stringify({ why: why.slice(0, 500) })]);
  const told = [liveState(manifest), ...numbers, JSON.stringify(holes), "", writer, ...noted];
  const script: Argument[] = ["EVAL", COMMIT, keys.length, ...keys, ...told];
  if (fields.length === 0) return [script];
  const parts = fields.flatMap(([name, value]) => [
    name,
    Buffer.from(value.buffer, value.byteOffset, value.byteLength),
  ]);
  return [["MULTI"], ["XADD", entries, "NOMKSTREAM", "*", ...parts], script, ["EXEC"]];
}

/** Return whether the block is committed, and the shard's progress, from the answer of a commit's script. */
export function readCommit(
  answer: unknown,
  block: PackedBlock,
  { partition, manifest }: ShardPlace,
  writer: string,
): [isCommitted: boolean, progress: Progress] {
  if (typeof answer === "number" || typeof answer === "bigint") {
    return [true, { end: block.end, state: liveState(manifest), heldBytes: Number(answer), writer }];
  }
  if (!Array.isArray(answer) || answer.length !== 4) {
    throw new PenstockError(`the script of a commit answered ${String(answer).slice(0, 80)}`);
  }
  const [at, state, held, newest] = answer.map((one) => textOf(one) as string) as [string, string, string, string];
  return readable(partition.roster, () => {
    const end = endOf(at);
    return [false, { end, state, heldBytes: integer(held), writer: end > 0 ? newest : null }];
  });
}

/** Return the answer of a commit's script, out of the answers to its commands. Raises what the server refused. */
export function scriptAnswer(replies: readonly unknown[]): unknown {
  const last = replies.at(-1);
  if (replies.length === 1) {
    raiseErrors(replies);
    return last;
  }
  if (!Array.isArray(last)) {
    raiseErrors(replies);
    throw new PenstockError(`EXEC answered ${String(last).slice(0, 80)}, expected a list`);
  }
  const found = last.map((one) => (one instanceof Error ? translated(one, []) : one));
  raiseErrors(found);
  return found.at(-1);
}

/** Raise the first error among answers: one that may pass before others. */
function raiseErrors(replies: readonly unknown[]): void {
  const errors = replies.filter((reply) => reply instanceof Error);
  const [first] = errors;
  if (first !== undefined) throw errors.find((error) => error instanceof ServerUnavailable) ?? first;
}

/** Return whether the server refused a command at its maxmemory. */
export function isOutOfMemory(replies: readonly unknown[]): boolean {
  const inside = replies.at(-1);
  const every = Array.isArray(inside) ? [...replies, ...inside] : replies;
  return every.some((reply) => reply instanceof Error && /\bOOM\b/.test(reply.message));
}
