/// <reference lib="esnext.disposable" preserve="true" />
// The public names of the npm package for Node. A page imports those of `browser.ts`.

export type { RowShuffle } from "./adapters/rows.js";
export type { Cast } from "./adapters/tensors.js";
export type { DatasetOf, TfLike } from "./adapters/tf.js";
export {
  type BatchSource,
  type DatasetControls,
  type DatasetOptions,
  dataset,
  type Names,
  type StepCallback,
} from "./adapters/tfjs.js";
export { Batch, type Identity, type Span } from "./batch.js";
export * from "./errors.js";
export { GatewayBatch } from "./gateway/batch.js";
export { type GatewayFacts, GatewayLoader } from "./gateway/loader.js";
export type { GatewayOptions, SocketLike } from "./gateway/options.js";
export type { LoaderBatch } from "./group/batch.js";
export { Loader, type LoaderFacts } from "./group/loader.js";
export type { Acknowledge, LoaderOptions, LoaderState } from "./group/options.js";
export { load } from "./load.js";
export { Replay, type ReplayFacts, type ReplayOptions, type ReplayState, replay } from "./replay/replay.js";
export type { ServerOptions } from "./server/client.js";
export type { RedisLike } from "./server/transport.js";
export type { Notify } from "./waiting.js";
export { digestOf } from "./wire/checksum.js";
export { type Block, Column, type DecodeOptions, decode, type Fields, offsetsOf, type Sample } from "./wire/codec.js";
export type { Dtype, TypedArray } from "./wire/dtypes.js";
export { type ColumnData, type EntryContents, encode } from "./wire/encode.js";
export { fromFloat32, toFloat32 } from "./wire/float16.js";
export type { Field, Header, SegmentRef } from "./wire/header.js";
export { parseSpec, type Spec, type TensorSpec } from "./wire/spec.js";
export type { EpochWriter } from "./write/epochWriter.js";
export type { RowsLike, RowValues } from "./write/rows.js";
export type { ShardWriter } from "./write/shard.js";
export type { SampleLike, SpecLike } from "./write/spec.js";
export type { Nested, Scalar, Shaped, Value } from "./write/values.js";
export { type EpochOptions, openWriter, type Writer, type WriterOptions } from "./write/writer.js";
