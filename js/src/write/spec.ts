// Specs as a writer uses them: a user's spec as JSON, inference from a sample, nested names, and the check of a
// sample's names.

import { BadSpec } from "../errors.js";
import { parseSpec, type Spec, type TensorSpec } from "../wire/spec.js";
import { an, dtypeOf, flat, isScalar, isShaped, mismatch, type Nested, type Scalar, type Value } from "./values.js";

/** A spec as users give it: `{ x: ["uint8", [224, 224, 3]], y: ["int64", []] }`, or its JSON text. */
export type SpecLike = Spec | string | Readonly<Record<string, readonly [string, readonly (number | null)[]]>>;
/** Tensor name to value. An object among the values becomes tensors below its name: `{ y: { boxes } }` is `y/boxes`. */
export interface SampleLike {
  readonly [name: string]: Value | SampleLike;
}

const NUMBERS = ["bool", "int64", "float64"] as const;

/** Return the spec of its public form. Raises BadSpec. */
export function specLike(spec: SpecLike): Spec {
  if (typeof spec === "string") return parseSpec(spec);
  if (Array.isArray(spec)) return parseSpec(specJson(spec as Spec));
  const text = JSON.stringify(spec);
  if (text === undefined) throw new BadSpec(`${String(spec)} is not a spec; one looks like {"x": ["uint8", [2]]}`);
  return parseSpec(text);
}

/** Return the JSON form as Python writes it into the stream's meta. */
export function specJson(spec: Spec): string {
  const sizes = ({ shape }: TensorSpec) => `[${shape.map((size) => size ?? "null").join(", ")}]`;
  return `{${spec.map((one) => `${JSON.stringify(one.name)}: ["${one.dtype}", ${sizes(one)}]`).join(", ")}}`;
}

/** Return a spec for people: `x: uint8[3, 5], y: int64`. */
export function toldSpec(spec: Spec): string {
  return spec
    .map(({ name, dtype, shape }) => {
      const sizes = shape.map((size) => size ?? "?").join(", ");
      return `${name}: ${dtype}${shape.length > 0 ? `[${sizes}]` : ""}`;
    })
    .join(", ");
}

/** Return whether two specs have the same tensors in the same order. */
export function isSameSpec(one: Spec, other: Spec): boolean {
  return specJson(one) === specJson(other);
}

/** Return a sample whose nested objects are tensors named `a/b`: the same object where it has none. */
export function flattened(sample: SampleLike): Readonly<Record<string, unknown>> {
  if (typeof sample !== "object" || sample === null || ArrayBuffer.isView(sample) || Array.isArray(sample)) {
    throw new TypeError(`a sample is ${an(sample)}, expected an object of tensors by name: { x: ..., y: ... }`);
  }
  if (!Object.values(sample).some(isNest)) return sample;
  const found: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(sample)) {
    const below = isNest(value) ? Object.entries(flattened(value)) : [];
    const parts =
      below.length > 0 ? below.map(([inner, part]) => [`${name}/${inner}`, part] as const) : [[name, value] as const];
    for (const [inner, part] of parts) {
      if (Object.hasOwn(found, inner)) throw mismatch(inner, "two of that name", "one");
      found[inner] = part;
    }
  }
  return found;
}

function isNest(value: unknown): value is SampleLike {
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value) || Array.isArray(value)) return false;
  const kind = Object.getPrototypeOf(value);
  return (kind === Object.prototype || kind === null) && !isShaped(value) && !("data" in value && "shapes" in value);
}

/**
 * Return the spec of one sample: its own dtypes and shapes. A whole number is int64, another one float64, a Buffer or a
 * string bytes.
 *
 * @throws BadSpec for a value that cannot travel.
 */
export function inferSpec(sample: SampleLike): Spec {
  const tensors = Object.entries(flattened(sample)).map(([name, value]) => {
    const [dtype, shape] = kindOf(name, value);
    return `${JSON.stringify(name)}: ["${dtype}", ${JSON.stringify(shape)}]`;
  });
  return parseSpec(`{${tensors.join(", ")}}`);
}

function kindOf(name: string, value: unknown): readonly [string, readonly number[]] {
  if (typeof value === "string" || Buffer.isBuffer(value)) return ["bytes", []];
  if (isShaped(value)) return [dtypeOf(value.data) as string, value.shape];
  const dtype = dtypeOf(value);
  if (dtype !== null) return [dtype, [(value as ArrayLike<unknown>).length]];
  const found = Array.isArray(value) || isScalar(value) ? flat(value as Scalar | Nested) : null;
  if (found === null) throw new BadSpec(`tensor '${name}': ${an(value)} is no array; make it one, or bytes`);
  if (found.numbers.length === 0) return ["float64", found.shape]; // as numpy has it
  return [NUMBERS[found.rank as 0 | 1 | 2], found.shape];
}

/** Return the rows that a sample of this spec has if it was a batch, or 0 if it does not look like one. */
export function rowsOf(spec: Spec): number {
  const first = new Set(spec.map(({ shape }) => shape[0] ?? null));
  const sizes = new Set(spec.map(({ shape }) => shape.length));
  const [rows] = first;
  return first.size === 1 && sizes.size > 1 && Math.min(...sizes) === 1 && rows && rows > 1 ? rows : 0;
}

/** Raise SpecMismatch unless a sample has exactly this spec's tensors. */
export function checkNames(spec: Spec, sample: Readonly<Record<string, unknown>>): void {
  for (const { name } of spec) {
    if (Object.hasOwn(sample, name)) continue;
    const there = Object.keys(sample).join(", ") || "nothing";
    const hint = `the sample has ${there}, and each sample needs every tensor`;
    throw mismatch(name, "nothing", `a tensor, the spec being ${toldSpec(spec)}`, hint);
  }
  const known = new Set(spec.map(({ name }) => name));
  for (const name of Object.keys(sample)) {
    if (!known.has(name)) throw mismatch(name, "a tensor", `none of that name, the spec being ${toldSpec(spec)}`);
  }
}
