// Finds the names most similar to a misspelt one, for "did you mean", by the same measure as Python's difflib.

const CUTOFF = 0.6;

/** Return the one of `names` that `name` is probably a misspelling of, or "". Python's difflib finds the same. */
export function near(name: string, names: Iterable<string>): string {
  const wanted = name.toLowerCase();
  let found = "";
  let best = CUTOFF;
  for (const one of names) {
    const ratio = similarity(one.toLowerCase(), wanted);
    if (ratio > best || (found === "" && ratio === best)) {
      best = ratio;
      found = one;
    }
  }
  return found;
}

/** Return the names that are most similar, in alphabetical order. Of equal ones the last come first, as in difflib. */
export function nearest(name: string, names: Iterable<string>, count: number): string[] {
  const ranked = [...names].map((one) => ({ one, ratio: similarity(one, name) }));
  ranked.sort((a, b) => b.ratio - a.ratio || (a.one < b.one ? 1 : -1));
  return ranked
    .slice(0, count)
    .map(({ one }) => one)
    .sort();
}

/** Return twice the characters in matching blocks, as a part of all characters (Ratcliff and Obershelp). */
function similarity(a: string, b: string): number {
  const length = a.length + b.length;
  return length === 0 ? 1 : (2 * matches(a, b)) / length;
}

function matches(a: string, b: string): number {
  let size = 0;
  let atA = 0;
  let atB = 0;
  for (let i = 0; i < a.length; i += 1) {
    for (let j = 0; j < b.length; j += 1) {
      let same = 0;
      while (i + same < a.length && j + same < b.length && a[i + same] === b[j + same]) same += 1;
      if (same > size) [size, atA, atB] = [same, i, j];
    }
  }
  if (size === 0) return 0;
  const before = matches(a.slice(0, atA), b.slice(0, atB));
  return before + size + matches(a.slice(atA + size), b.slice(atB + size));
}
