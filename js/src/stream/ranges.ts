// Sets of numbers as text, such as `0-4,6`. Meta and rosters have released epochs so.

import { integer } from "./damage.js";

/** A range of numbers, both ends inclusive. */
export type Range = readonly [low: number, high: number];

/** Return the ranges of a text such as `0-4,6`. Raises RangeError. */
export function parseRanges(text: string): Range[] {
  const parts = text.split(",").filter((part) => part !== "");
  return parts.map((part) => {
    const [low, high] = part.split("-");
    return [integer(low), integer(high ?? low)];
  });
}

/** Return whether a number is in one of the ranges. */
export function isIn(ranges: readonly Range[], number: number): boolean {
  return ranges.some(([low, high]) => low <= number && number <= high);
}
