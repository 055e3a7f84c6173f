// The values that all shards of one writer share: connections, stream, admission, and the writer's options.

import type { Server } from "../server/client.js";
import type { ReplicaWatch } from "../stream/durability.js";
import type { Stream } from "../stream/stream.js";
import type { Lateness, Notify } from "../waiting.js";
import type { Shared } from "./admission.js";
import type { AdmissionOrder } from "./order.js";

/** What the shards of one writer share. */
export interface WriterContext extends Shared {
  /** The connection for commits. It repeats nothing. */
  readonly server: Server;
  /** The same connection for commands that are repeated while the server is away. */
  readonly control: Server;
  readonly stream: Stream;
  /** The servers that replicas follow. */
  readonly replicas: ReplicaWatch;
  readonly order: AdmissionOrder;
  readonly notify: Notify;
  /** Whether entries carry a checksum. */
  readonly checksum: boolean;
  /** The longest wait for space, or null for no limit. */
  readonly roomWaitMs: number | null;
  /** Whether the server owes an answer. */
  readonly stallDetector: Lateness;
}
