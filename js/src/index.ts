export * from "./errors.js";
export { digestOf } from "./wire/checksum.js";
export { type Block, Column, type DecodeOptions, decode, type Fields, offsetsOf, type Sample } from "./wire/codec.js";
export { type Dtype, type TypedArray, toFloat32 } from "./wire/dtypes.js";
export { type ColumnData, type EntryContents, encode } from "./wire/encode.js";
export type { Field, Header, SegmentRef } from "./wire/header.js";
export { parseSpec, type Spec, type TensorSpec } from "./wire/spec.js";
