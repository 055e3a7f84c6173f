// The commit check: whether an index record, or a repair, names a received entry.

import { UncommittedEntry } from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { isIndexed } from "../stream/indexRecords.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import type { Header } from "../wire/header.js";

/** Index records asked for at once. */
const PAGE = 32;
/** Shards of which a page is kept. */
const MOST_SHARDS = 256;

/** The test whether an index record names an entry. */
export class CommitCheck {
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #size: number;
  /** `epoch:shard` to the id of a record, which is the block's end, to the id of its entry. */
  readonly #pages = new Map<string, Map<string, string>>();

  /** @param members The members of the group, which divide what comes. */
  constructor(server: Server, stream: Stream, members: number) {
    this.#server = server;
    this.#stream = stream;
    this.#size = Math.max(1, Math.floor(PAGE / members));
  }

  /** Raise UncommittedEntry unless the index, or a repair, names the entry. */
  async require(header: Header, entryId: string): Promise<void> {
    const { epoch, shard, first, end } = header;
    const at = `${epoch}:${shard}`;
    if (this.#pages.get(at)?.get(`${end}-0`) === entryId) return;
    const partition = partitionOf(this.#stream, shard);
    const index = partition.index(epoch, shard);
    const words = textOf(await this.#server.run("list_committed", [index], [`${end}-0`, this.#size])) ?? "";
    const parts = words === "" ? [] : words.split(" ");
    const page = new Map<string, string>();
    for (let i = 0; i + 1 < parts.length; i += 2) page.set(parts[i] as string, parts[i + 1] as string);
    if (this.#pages.size >= MOST_SHARDS) this.#pages.clear();
    this.#pages.set(at, page);
    if (page.get(`${end}-0`) === entryId) return;
    if (await isIndexed(this.#server, partition, epoch, shard, end, entryId)) return;
    throw new UncommittedEntry(
      `no record of the index names this entry, which claims shard ${shard} offsets ${first}-${end - 1}: no commit of ` +
        `Penstock wrote it, or its record was lost; \`penstock audit ${this.#stream.name}\` tells`,
    );
  }
}
