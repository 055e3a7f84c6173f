// The test whether a server that was restarted or replaced may deliver an entry again that it delivered before.

import type { Server } from "../server/client.js";
import type { PartitionKeys } from "../stream/keys.js";
import { compareIds, newestEntry } from "../stream/pending.js";
import { loadRoster } from "../stream/roster.js";
import { RunWatch } from "../stream/serverRuns.js";

/**
 * The test whether a server may have lost that it delivered an entry. A replica that takes over may lack that an entry was
 * delivered and acknowledged. It delivers the entry again, as a new one. The member that acknowledged it sends the
 * acknowledgement again, so the ledger knows what is done.
 */
export class DeliveryCheck {
  readonly #server: Server;
  #partitions: readonly PartitionKeys[];
  #watch: RunWatch;
  /** `partition:epoch` to the newest entry that the server had when it was found to be another one. */
  readonly #newest = new Map<string, string>();

  /**
   * @param server The connections that entries are read on. Their failures are not waited for.
   * @param partitions The partitions on one server. Their slots may move to others.
   */
  constructor(server: Server, partitions: readonly PartitionKeys[]) {
    this.#server = server;
    this.#partitions = partitions;
    this.#watch = new RunWatch(
      server,
      partitions.map(({ roster }) => roster),
    );
  }

  /**
   * Return a check of some of the partitions, which knows what this one knows. This one looks at them until `keep`, because
   * what was asked for before is judged by it.
   */
  split(partitions: readonly PartitionKeys[]): DeliveryCheck {
    const other = new DeliveryCheck(this.#server, partitions);
    for (const [entry, newest] of this.#newest) other.#newest.set(entry, newest);
    other.#watch = this.#watch.of(partitions.map(({ roster }) => roster));
    return other;
  }

  /** Look at these partitions only from now on. Another check looks at the others. */
  keep(partitions: readonly PartitionKeys[]): void {
    this.#partitions = partitions;
    this.#watch = this.#watch.of(partitions.map(({ roster }) => roster));
  }

  /**
   * Call `settle`, and doubt the entries of now, if the server is another one than at the last call. The first call only
   * learns which server it is. A call after a failure does it all again.
   *
   * @throws ServerUnavailable.
   */
  async look(settle: () => Promise<void> = async () => {}): Promise<void> {
    await this.#watch.isAnother(async () => {
      for (const partition of this.#partitions) {
        for (const epoch of (await loadRoster(this.#server, partition)).epochs) {
          const newest = await newestEntry(this.#server, { partition, epoch });
          if (newest !== null) this.#newest.set(`${partition.number}:${epoch}`, newest);
        }
      }
      await settle();
    });
  }

  /** Return whether a new entry may have been delivered and acknowledged before. */
  doubts({ number }: PartitionKeys, epoch: number, entryId: string): boolean {
    const newest = this.#newest.get(`${number}:${epoch}`);
    return newest !== undefined && compareIds(entryId, newest) <= 0;
  }
}
