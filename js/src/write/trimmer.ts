// The trimmer: removes the entries of a running epoch that every group has acknowledged, from many shards at once.

import { entriesOf, type Server } from "../server/client.js";
import { type IndexRecord, indexRecord } from "../stream/indexRecords.js";
import type { PartitionKeys } from "../stream/keys.js";
import type { Range } from "../stream/ledger.js";
import { begunShards, findManifest, type Manifest } from "../stream/manifest.js";
import { serverMs } from "../stream/roster.js";
import type { Stream } from "../stream/stream.js";
import { now } from "../waiting.js";
import { acknowledgedBits, covers } from "./acknowledged.js";
import { type Holder, type Holders, isHeld, loadHolders, unfinishedGroups } from "./holders.js";

/** The share of the budget that is freed beyond what is needed, so that not every block needs a new plan. */
const SLACK_SHARE = 0.1;
/** Records in the first page of a shard. Later pages have up to `CHUNK`. */
const FIRST_PAGE = 64;
/** Ids in one script call. It bounds how long the server is busy with the call. */
const CHUNK = 250;
/** Shards whose indexes are read at once, and how far beyond the highest begun shard they are read. */
const SHARDS_AT_ONCE = 64;
/** The time between two readings of the shards beyond. */
const FAR_MS = 1000;

/** What is known of an epoch in one partition, so that the server is not asked again. */
interface EpochMemory {
  /** Shard to the offset below which every entry is known to be removed. */
  readonly floors: Map<number, number>;
  /** Shard to the ends of removed entries beyond the floor. They follow an entry that some group still holds. */
  readonly gone: Map<number, Set<number>>;
  /** The highest shard that is known to have entries. */
  begun: number;
  /** When the shards far beyond it were last read. */
  farAt: number;
}

/** Return entries that every group has acknowledged, in order, until `needBytes` are free. */
export function planTrim(
  records: readonly IndexRecord[],
  acknowledged: readonly (readonly boolean[])[],
  needBytes: number,
  base = 0,
): IndexRecord[] {
  const plan: IndexRecord[] = [];
  let freed = 0;
  for (const record of records) {
    if (freed >= needBytes || plan.length >= CHUNK) break;
    if (record.entryId === "" || !acknowledged.every((bits) => covers(bits, record, base))) continue;
    plan.push(record);
    freed += record.bytes;
  }
  return plan;
}

/** Return the groups whose acknowledgements decide which entries of an epoch may go. If there are none, none may. */
export function trimmingGroups(holders: Holders, epoch: number): [name: string, group: Holder][] {
  const unfinished = [...unfinishedGroups(holders, epoch)];
  return unfinished.length > 0
    ? unfinished
    : [...holders.groups].filter(([, { holds, first }]) => holds && first <= epoch);
}

/** Removes entries that every group has acknowledged, for a writer that waits for space. It never releases an epoch. */
export class Trimmer {
  readonly #server: Server;
  readonly #stream: Stream;
  /** `partition:epoch` to what is known of it. */
  readonly #memories = new Map<string, EpochMemory>();

  constructor(server: Server, stream: Stream) {
    this.#server = server;
    this.#stream = stream;
  }

  /** Try to free `needBytes` of a partition's payload and a little more, and return the bytes freed. */
  async trim(partition: PartitionKeys, needBytes: number): Promise<number> {
    const holders = await loadHolders(this.#server, partition);
    const nowMs = await serverMs(this.#server, partition);
    const slack = Math.floor((this.#stream.budgetBytes / this.#stream.partitions.length) * SLACK_SHARE);
    this.#forget(partition, holders.epochs);
    let freed = 0;
    for (const epoch of holders.epochs) {
      const need = needBytes + slack - freed;
      if (need <= 0) break;
      if (!isHeld(holders, epoch, nowMs)) freed += await this.#trimEpoch(partition, holders, epoch, need);
    }
    return freed;
  }

  #forget(partition: PartitionKeys, kept: readonly number[]): void {
    const names = new Set(kept.map((epoch) => `${partition.number}:${epoch}`));
    for (const name of this.#memories.keys()) {
      if (name.startsWith(`${partition.number}:`) && !names.has(name)) this.#memories.delete(name);
    }
  }

  async #trimEpoch(partition: PartitionKeys, holders: Holders, epoch: number, need: number): Promise<number> {
    const groups = trimmingGroups(holders, epoch);
    const manifest = groups.length > 0 ? await findManifest(this.#server, this.#stream, epoch) : null;
    if (manifest === null) return 0;
    const memory = this.#memoryOf(partition, epoch);
    let freed = 0;
    const shards = await this.#worthAsking(partition, manifest, memory);
    for (let at = 0; at < shards.length && freed < need; at += SHARDS_AT_ONCE) {
      const some = shards.slice(at, at + SHARDS_AT_ONCE);
      const pages = await Promise.all(some.map((shard) => this.#page(partition, memory, epoch, shard)));
      for (const [place, shard] of some.entries()) {
        const page = pages[place] as IndexRecord[];
        if (page.length === 0) continue;
        memory.begun = Math.max(memory.begun, shard);
        const now = await this.#trimShard(partition, holders, groups, manifest, memory, shard, page, need - freed);
        if (now === null) return freed; // a group joined since the plan
        freed += now;
        if (freed >= need) break;
      }
    }
    return freed;
  }

  #memoryOf(partition: PartitionKeys, epoch: number): EpochMemory {
    const name = `${partition.number}:${epoch}`;
    let memory = this.#memories.get(name);
    if (memory === undefined) {
      memory = { floors: new Map(), gone: new Map(), begun: -1, farAt: Number.NEGATIVE_INFINITY };
      this.#memories.set(name, memory);
    }
    return memory;
  }

  /** Return the shards of this partition that may have something to remove, in order. */
  async #worthAsking({ number }: PartitionKeys, manifest: Manifest, memory: EpochMemory): Promise<number[]> {
    const every = this.#stream.partitions.length;
    const isFar = now() - memory.farAt >= FAR_MS;
    if (isFar) memory.farAt = now();
    const begun = await begunShards(this.#server, this.#stream, manifest);
    const end = isFar ? begun : Math.min(begun, memory.begun + SHARDS_AT_ONCE * every + 1);
    const shards: number[] = [];
    for (let shard = number; shard < end; shard += every) {
      const size = manifest.sizes?.[shard] ?? manifest.done.get(shard) ?? Number.POSITIVE_INFINITY;
      if ((memory.floors.get(shard) ?? 0) < size) shards.push(shard);
    }
    return shards;
  }

  async #page(
    partition: PartitionKeys,
    { floors }: EpochMemory,
    epoch: number,
    shard: number,
    after = floors.get(shard) ?? 0,
    size = FIRST_PAGE,
  ): Promise<IndexRecord[]> {
    const key = partition.index(epoch, shard);
    const start = after === 0 ? "-" : `(${after}-0`;
    const found = entriesOf(await this.#server.call("XRANGE", key, start, "+", "COUNT", size));
    return found.map(([id, fields]) => indexRecord(id, fields, key));
  }

  /** Remove acknowledged entries of one shard. Returns the bytes freed, or null if a group joined meanwhile. */
  async #trimShard(
    partition: PartitionKeys,
    { generation }: Holders,
    groups: readonly [string, Holder][],
    manifest: Manifest,
    memory: EpochMemory,
    shard: number,
    begin: IndexRecord[],
    need: number,
  ): Promise<number | null> {
    const gone = memory.gone.get(shard) ?? new Set();
    memory.gone.set(shard, gone);
    let freed = 0;
    let size = FIRST_PAGE;
    for (let page = begin; page.length > 0; ) {
      const span: Range = [(page[0] as IndexRecord).first, (page.at(-1) as IndexRecord).end];
      const bits = await Promise.all(
        groups.map(([name, group]) =>
          acknowledgedBits(this.#server, this.#stream, { manifest, shard }, name, group, span, true),
        ),
      );
      const left = page.filter(({ end }) => !gone.has(end));
      const plan = planTrim(left, bits, need - freed, span[0]);
      const answer = await this.#remove(partition, manifest.epoch, generation, plan);
      if (answer === null) return null;
      freed += answer; // less than planned if another writer removed some of it
      for (const { end } of plan) gone.add(end);
      raiseFloor(memory, gone, shard, page);
      if (page.length < size || freed >= need) break;
      size = Math.min(2 * size, CHUNK);
      page = await this.#page(partition, memory, manifest.epoch, shard, span[1], size);
    }
    return freed;
  }

  async #remove(
    partition: PartitionKeys,
    epoch: number,
    generation: string,
    records: readonly IndexRecord[],
  ): Promise<number | null> {
    if (records.length === 0) return 0;
    const keys = [partition.roster, partition.entries(epoch), partition.segments(epoch)];
    const args = records.flatMap(({ entryId, bytes }) => [entryId, bytes, ""]);
    const freed = Number(await this.#server.run("trim", keys, [generation, epoch, ...args]));
    return freed < 0 ? null : freed;
  }
}

/** Raise the shard's floor over the removed ones among these records. */
function raiseFloor({ floors }: EpochMemory, gone: Set<number>, shard: number, page: readonly IndexRecord[]): void {
  let floor = floors.get(shard) ?? 0;
  for (const { first, end, entryId } of page) {
    if (floor >= first && (gone.has(end) || entryId === "")) floor = end;
  }
  floors.set(shard, floor);
  for (const end of gone) if (end <= floor) gone.delete(end);
}
