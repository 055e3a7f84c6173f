// Texts for people: spells out what is not printable, because names and reasons of other programs must not control a
// terminal.

/** Return a text as one line in which each character that is not printable is spelled out, as in `\x1b`. */
export function printable(text: string): string {
  return text.replace(/(?! )[\p{C}\p{Z}]/gu, (char) => {
    const code = (char.codePointAt(0) as number).toString(16);
    return code.length > 2 ? `\\u{${code}}` : `\\x${code.padStart(2, "0")}`;
  });
}
