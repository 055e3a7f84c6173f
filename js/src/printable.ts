// Texts for people: numbers of bytes, and names and reasons of other programs, which must not control a terminal.

/** Return a text as one line in which each character that is not printable is spelled out, as in `\x1b`. */
export function printable(text: string): string {
  return text.replace(/(?! )[\p{C}\p{Z}]/gu, (char) => {
    const code = (char.codePointAt(0) as number).toString(16);
    return code.length > 2 ? `\\u{${code}}` : `\\x${code.padStart(2, "0")}`;
  });
}

/** Return bytes as people read them. Python's messages have the same. */
export function readableBytes(count: number): string {
  if (count > 0 && count < 1024) return `${count} byte${count > 1 ? "s" : ""}`;
  if (count < 2 ** 20) return `${(count / 1024).toFixed(0)} KiB`;
  return `${(count / 2 ** 20).toFixed(count >= 10 * 2 ** 20 ? 0 : 1)} MiB`;
}
