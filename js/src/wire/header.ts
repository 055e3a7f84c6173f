// Entry headers: the `meta` field, one compact JSON object, parsed with every number bounded, with the `ref` to a
// segment.

import { BadEntry, UnsupportedVersion } from "../errors.js";
import { type Json, type JsonObject, parseJson } from "./json.js";
import {
  MAX_ENTRY_BYTES,
  MAX_FIELD_BYTES,
  MAX_HEADER_BYTES,
  MAX_HOLES,
  MAX_NUMBER,
  MAX_SHARD_SAMPLES,
} from "./limits.js";
import { inlineShapes } from "./ragged.js";
import { SHAPES_SUFFIX, type Spec } from "./spec.js";

export const VERSION = 1;
export const STREAM_ID = /^[A-Za-z0-9._-]{1,64}$/;
const DIGEST = /^[0-9a-f]{16}$/;
const SEGMENT = /^[0-9]{1,16}-[0-9]{1,4}-[0-9a-f]{12}\.seg$/;
const ZSTD = "zstd";
const ALIGN = 64;
const PAGE = 4096;
const MAX_SEGMENT_BYTES = 2 ** 40;
const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** The place of an entry's payload in a segment file. */
export interface SegmentRef {
  /** A file name without a folder. */
  readonly file: string;
  /** The offset of the first payload field. Each further field begins at the next multiple of 64. */
  readonly at: number;
  /** The bytes of each payload field, in wire order. */
  readonly sizes: readonly number[];
}

/** A payload field that a header announces. The size of a ragged or compressed tensor's values is not known here. */
export interface Field {
  readonly name: string;
  readonly size: number | null;
}

/** The parsed header of an entry. */
export interface Header {
  /** The stream's random id. */
  readonly stream: string;
  readonly epoch: number;
  readonly shard: number;
  /** The offset in the shard of the first sample or hole of this entry. */
  readonly first: number;
  /** The number of samples present, at least 1. */
  readonly count: number;
  /** Offsets without a sample, ascending. */
  readonly holes: readonly number[];
  /** The offset after the last sample or hole. */
  readonly end: number;
  /** Ragged tensor to its samples' shapes, n * ndim sizes. A tensor whose shapes have a field of their own has none. */
  readonly shapes: ReadonlyMap<string, Int32Array>;
  readonly xxh3: string | null;
  readonly ref: SegmentRef | null;
  /** Whether a repair wrote it for lost samples. */
  readonly isRepair: boolean;
  /** The tensors whose payload field is a zstd frame. */
  readonly compressed: ReadonlySet<string>;
  /** The payload fields, in order. */
  readonly fields: readonly Field[];
}

/**
 * Parse and bound a header that was written for a stream of this spec.
 *
 * @param data The `meta` field.
 * @param spec The stream's spec.
 * @param options `takesRefs`: accept a payload in a segment file.
 * @throws BadEntry if the header is damaged, UnsupportedVersion if a later version of Penstock wrote it.
 */
export function parseHeader(data: Uint8Array, spec: Spec, options: { takesRefs?: boolean } = {}): Header {
  const value = objectOf(data);
  const version = numberOf(value, "v", 1, MAX_NUMBER);
  if (version !== VERSION) {
    throw new UnsupportedVersion(`entry of wire format v${version}, this process knows v${VERSION}: update penstock`);
  }
  if (value.has("ref") && !options.takesRefs) {
    throw new UnsupportedVersion("entry uses ref, which this reader does not know");
  }
  const compressed = compressedOf(value.get("compression"), spec);
  const stream = textOf(value, "stream", STREAM_ID);
  const xxh3 = value.has("xxh3") ? textOf(value, "xxh3", DIGEST) : null;
  const first = numberOf(value, "first", 0, MAX_SHARD_SAMPLES - 1);
  const count = numberOf(value, "count", 1, MAX_SHARD_SAMPLES);
  const epoch = numberOf(value, "epoch", 0, MAX_NUMBER);
  const shard = numberOf(value, "shard", 0, MAX_NUMBER);
  const holes = holesOf(value.get("holes"), first, count);
  const shapes = shapesOf(value.get("tensors"), count, spec);
  const fields = fieldsOf(spec, count, shapes, compressed);
  const ref = value.has("ref") ? refOf(value.get("ref") as Json, fields) : null;
  const end = first + count + holes.length;
  const isRepair = value.get("repair") === true;
  return { stream, epoch, shard, first, count, holes, end, shapes, xxh3, ref, isRepair, compressed, fields };
}

function objectOf(data: Uint8Array): JsonObject {
  if (data.byteLength > MAX_HEADER_BYTES) {
    throw new BadEntry(`header of ${data.byteLength} bytes, at most ${MAX_HEADER_BYTES} are read`);
  }
  let value: Json;
  try {
    value = parseJson(UTF8.decode(data));
  } catch (error) {
    throw new BadEntry(`header is not JSON: ${(error as Error).message.slice(0, 80)}`);
  }
  if (!(value instanceof Map)) throw new BadEntry("header is not a JSON object");
  return value;
}

function isInteger(value: Json | undefined, low: number, high: number): value is number {
  return typeof value === "number" && value >= low && value <= high;
}

function numberOf(value: JsonObject, key: string, low: number, high: number): number {
  const found = value.get(key);
  if (!isInteger(found, low, high)) throw new BadEntry(`${key} is not an integer from ${low} to ${high}`);
  return found;
}

function textOf(value: JsonObject, key: string, form: RegExp): string {
  const found = value.get(key);
  if (typeof found !== "string" || !form.test(found))
    throw new BadEntry(`${key} does not have the form ${form.source}`);
  return found;
}

function holesOf(value: Json | undefined, first: number, count: number): number[] {
  if (value === undefined) value = [];
  if (!Array.isArray(value) || value.length > MAX_HOLES) {
    throw new BadEntry(`holes is not a list of at most ${MAX_HOLES} offsets`);
  }
  const end = first + count + value.length;
  if (end > MAX_SHARD_SAMPLES) {
    throw new BadEntry(`offsets run to ${end}, a shard has at most ${MAX_SHARD_SAMPLES}`);
  }
  let next = first;
  for (const hole of value) {
    if (!isInteger(hole, next, end - 1)) throw new BadEntry(`holes do not rise within offsets ${first} to ${end}`);
    next = hole + 1;
  }
  return value as number[];
}

function shapesOf(value: Json | undefined, count: number, spec: Spec): Map<string, Int32Array> {
  if (!(value instanceof Map) || value.size !== spec.length) {
    throw new BadEntry(`tensors is not an object of ${spec.length} tensors`);
  }
  const shapes = new Map<string, Int32Array>();
  for (const tensor of spec) {
    const said = value.get(tensor.name);
    if (
      !(said instanceof Map) ||
      said.get("dtype") !== tensor.dtype ||
      !hasShape(said.get("shape"), count, tensor.shape)
    ) {
      throw new BadEntry(
        `tensor ${tensor.name} is not ${tensor.dtype} of shape ${JSON.stringify([count, ...tensor.shape])}`,
      );
    }
    if (!said.has("shapes")) continue;
    if (!tensor.isRagged) throw new BadEntry(`tensor ${tensor.name} is not ragged, yet has shapes`);
    shapes.set(tensor.name, inlineShapes(said.get("shapes"), count, tensor));
  }
  return shapes;
}

function hasShape(value: Json | undefined, count: number, shape: readonly (number | null)[]): boolean {
  const wanted = [count, ...shape];
  return Array.isArray(value) && value.length === wanted.length && value.every((size, axis) => size === wanted[axis]);
}

function fieldsOf(
  spec: Spec,
  count: number,
  shapes: ReadonlyMap<string, Int32Array>,
  compressed: ReadonlySet<string>,
): Field[] {
  const fields: Field[] = [];
  for (const tensor of spec) {
    const { name, isRagged } = tensor;
    if (isRagged && !shapes.has(name)) fields.push({ name: name + SHAPES_SUFFIX, size: 8 * count * tensor.wireNdim });
    fields.push({ name, size: isRagged ? null : count * tensor.sampleBytes });
  }
  let total = 0;
  for (const { name, size } of fields) {
    if ((size ?? 0) > MAX_FIELD_BYTES)
      throw new BadEntry(`field ${name} of ${size} bytes, at most ${MAX_FIELD_BYTES} are read`);
    total += size ?? 0;
  }
  if (total > MAX_ENTRY_BYTES) throw new BadEntry(`an entry of ${total} bytes, at most ${MAX_ENTRY_BYTES} are read`);
  return fields.map((field) => (compressed.has(field.name) ? { name: field.name, size: null } : field));
}

/** Return the compressed tensors. Raises UnsupportedVersion for codecs of another reader. */
function compressedOf(value: Json | undefined, spec: Spec): ReadonlySet<string> {
  if (value === undefined) return new Set();
  if (!(value instanceof Map)) throw new UnsupportedVersion("entry uses compression in a form of a later version");
  for (const [name, codec] of value) {
    if (codec === ZSTD) continue;
    const what = `tensor ${JSON.stringify(name).slice(0, 80)} is compressed with ${JSON.stringify(codec).slice(0, 80)}`;
    throw new UnsupportedVersion(
      `${what}, and this package reads zstd only: read the stream in Python, or write it with compression zstd`,
    );
  }
  const names = new Set(value.keys());
  if (names.size === 0 || spec.filter(({ name }) => names.has(name)).length !== names.size) {
    throw new BadEntry("compression does not name tensors of the spec");
  }
  return names;
}

function refOf(value: Json, fields: readonly Field[]): SegmentRef {
  if (!Array.isArray(value) || value.length !== 3) throw new BadEntry("ref is not a list of file, offset and sizes");
  const [file, at, sizes] = value;
  if (typeof file !== "string" || !SEGMENT.test(file)) throw new BadEntry("ref does not name a segment");
  if (!isInteger(at, PAGE, MAX_SEGMENT_BYTES - 1) || at % ALIGN !== 0) {
    throw new BadEntry(`ref has an offset that is not a multiple of ${ALIGN} from ${PAGE}`);
  }
  if (!Array.isArray(sizes) || !sizes.every((size): size is number => isInteger(size, 0, MAX_FIELD_BYTES))) {
    throw new BadEntry("ref has sizes that are no sizes of fields");
  }
  const total = sizes.reduce((sum, size) => sum + size, 0);
  if (total > MAX_ENTRY_BYTES) throw new BadEntry(`ref names ${total} bytes, at most ${MAX_ENTRY_BYTES} are read`);
  if (sizes.length !== fields.length) {
    throw new BadEntry(`ref has the sizes of ${sizes.length} fields, the header announces ${fields.length}`);
  }
  fields.forEach(({ name, size }, index) => {
    if (size !== null && size !== sizes[index])
      throw new BadEntry(`field ${name} has ${sizes[index]} bytes in ref, expected ${size}`);
  });
  return { file, at, sizes };
}
