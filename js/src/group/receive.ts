// Entries on their way from the server into batches: the checks of identity and commit, and which samples are
// acknowledged already.

import { BadEntry, SegmentGone } from "../errors.js";
import { decodeWhole } from "../segments/decode.js";
import type { SegmentReader } from "../segments/reader.js";
import { bytesOf, type Server, type StreamEntry, textOf } from "../server/client.js";
import type { PartitionKeys } from "../stream/keys.js";
import { ledgerBits, mergeRanges, type Range } from "../stream/ledger.js";
import { type Manifest, shardSize } from "../stream/manifest.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import { type Block, offsetsOf } from "../wire/codec.js";
import { type Header, parseHeader } from "../wire/header.js";
import type { Spec } from "../wire/spec.js";
import type { CommitCheck } from "./commitCheck.js";

/** An entry that was received: its samples, or why they cannot be used. */
export type Received = GoodEntry | BadReceived | MissingEntry;

export interface GoodEntry {
  readonly kind: "good";
  readonly entryId: string;
  readonly block: Block;
  /** Indices of the samples that are wanted, or null for all. */
  readonly rows: readonly number[] | null;
  /** The offsets that the group had acknowledged before it came. */
  readonly acknowledged: readonly Range[];
  readonly bytes: number;
}

export interface BadReceived {
  readonly kind: "bad";
  readonly entryId: string;
  readonly error: BadEntry;
  /** Null where it could not be believed. */
  readonly header: Header | null;
}

/** An entry that is listed but gone. */
export interface MissingEntry {
  readonly kind: "missing";
  readonly entryId: string;
}

/** What a receiver needs, the same for every entry. */
export interface ReceiveOptions {
  readonly server: Server;
  readonly stream: Stream;
  readonly spec: Spec;
  readonly segments: SegmentReader | null;
  readonly checksum: boolean;
}

/** Raise BadEntry unless the header names this stream and epoch, and offsets that the manifest has. */
export function checkIdentity(header: Header, stream: Stream, manifest: Manifest): void {
  if (header.stream !== stream.id || header.epoch !== manifest.epoch) {
    throw new BadEntry(
      `entry of stream ${header.stream} epoch ${header.epoch}, found in ${stream.id} ${manifest.epoch}`,
    );
  }
  if (header.end > shardSize(manifest, header.shard)) {
    throw new BadEntry(`shard ${header.shard} offsets ${header.first}-${header.end - 1} are not in the manifest`);
  }
}

/** Return an entry's fields, names and values. */
export function fieldsOf([, fields]: StreamEntry): [string, Uint8Array][] {
  const found: [string, Uint8Array][] = [];
  for (let at = 0; at + 1 < fields.length; at += 2) {
    found.push([bytesOf(fields[at]).toString("latin1"), bytesOf(fields[at + 1])]);
  }
  return found;
}

/** Decode an entry after `check` accepted its header. Raises BadEntry and what `check` raises. */
export async function decodeChecked(
  fields: readonly [string, Uint8Array][],
  { spec, segments, checksum }: ReceiveOptions,
  check: (header: Header) => void,
): Promise<Block> {
  const meta = fields[0];
  if (meta?.[0] !== "meta") throw new BadEntry("the first field is not 'meta'");
  check(parseHeader(meta[1], spec, { takesRefs: segments !== null }));
  return await decodeWhole(fields, spec, segments, checksum);
}

/** Where shared order finds an entry, and whose acknowledged samples it leaves out. */
export interface SharedScope {
  readonly manifest: Manifest;
  readonly partition: PartitionKeys;
  readonly group: string;
  /** Whether the entry was delivered before. Of a repaired entry acknowledged samples are always left out. */
  readonly isClaimed: boolean;
}

/** Receive one entry of a shared group. Only a failure of the server, or of this process, is raised. */
export async function receiveShared(
  options: ReceiveOptions,
  entry: StreamEntry,
  { manifest, partition, group, isClaimed }: SharedScope,
  committed: CommitCheck,
): Promise<Received> {
  const entryId = textOf(entry[0]) as string;
  if (!Array.isArray(entry[1])) return { kind: "missing", entryId };
  const fields = fieldsOf(entry);
  let header: Header | null = null;
  try {
    const block = await decodeChecked(fields, options, (found) => {
      checkIdentity(found, options.stream, manifest);
      if (partitionOf(options.stream, found.shard) !== partition) {
        throw new BadEntry(`shard ${found.shard} belongs to another partition`);
      }
      header = found;
    });
    await committed.require(block.header, entryId);
    const bytes = payloadBytes(block);
    const good = { kind: "good", entryId, block, bytes } as const;
    if (!isClaimed && !block.header.isRepair) return { ...good, rows: null, acknowledged: [] };
    const { epoch, shard, first, end } = block.header;
    const bits = await ledgerBits(options.server, partition, epoch, group, shard, [first, end]);
    const offsets = offsetsOf(block.header);
    const rows = bits.includes(true)
      ? [...offsets.keys()].filter((row) => !bits[(offsets[row] as number) - first])
      : null;
    const acknowledged = bits.flatMap((bit, at): Range[] => (bit ? [[first + at, first + at + 1]] : []));
    return { ...good, rows, acknowledged: mergeRanges(acknowledged) };
  } catch (error) {
    if (!(error instanceof BadEntry)) throw error;
    if (error instanceof SegmentGone) await options.segments?.require(); // then it is not this entry that is bad
    return { kind: "bad", entryId, error, header };
  }
}

/** Return the payload bytes of a block. */
export function payloadBytes({ columns }: Block): number {
  let bytes = 0;
  for (const { data } of columns.values()) bytes += data.byteLength;
  return bytes;
}
