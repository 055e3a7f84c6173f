/// <reference lib="esnext.disposable" preserve="true" />
// The public names for a page: reading through a gateway, TensorFlow.js, and the decoder. Nothing here needs Node.

import { GatewayLoader } from "./gateway/loader.js";
import type { GatewayOptions } from "./gateway/options.js";

export { type DatasetControls, type DatasetOptions, dataset } from "./adapters/tfjs.js";
export { Batch, type Identity, type Span } from "./batch.js";
export * from "./errors.js";
export { GatewayBatch } from "./gateway/batch.js";
export { type GatewayFacts, GatewayLoader } from "./gateway/loader.js";
export type { GatewayOptions, SocketLike } from "./gateway/options.js";
export { type Block, Column, decode, offsetsOf, type Sample } from "./wire/codec.js";
export { toFloat32 } from "./wire/float16.js";
export { parseSpec, type Spec, type TensorSpec } from "./wire/spec.js";

/**
 * Read the batches of a stream as a member of a group, through `penstock gateway`.
 *
 * @param stream The stream's name.
 * @returns The batches. Each iteration is the group's next epoch, or a feed without end.
 * @throws BadOption or BadName.
 */
export function load(stream: string, options: GatewayOptions): GatewayLoader {
  return new GatewayLoader(stream, options);
}
