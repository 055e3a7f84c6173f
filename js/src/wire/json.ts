// A JSON parser for headers and specs: it refuses duplicated keys, tells integers from other numbers, and keeps the
// order of members.

import { MAX_DEPTH } from "./limits.js";

/** A number that is not written as an integer, or that is beyond 2^53 - 1. No key of the format may hold one. */
export class OtherNumber {}

export type Json = null | boolean | number | string | OtherNumber | Json[] | JsonObject;
/** A JSON object with its members in the order of the text, which a plain JavaScript object loses for digits. */
export type JsonObject = Map<string, Json>;

const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const SPACE = /[ \t\n\r]*/y;
// A string without its quotes. The control characters are what JSON forbids.
// biome-ignore lint/suspicious/noControlCharactersInRegex: RFC 8259 forbids exactly these
const STRING = /"((?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"/y;

/**
 * Parse JSON as the wire format wants it. `JSON.parse` accepts duplicated keys, and reads `1.0` and `1` alike.
 *
 * @param text The JSON text.
 * @returns The value. Integers are numbers, every other number is an `OtherNumber`.
 * @throws SyntaxError for text that is not JSON, a duplicated key, or more than 32 levels.
 */
export function parseJson(text: string): Json {
  const parser = new Parser(text);
  const value = parser.value(0);
  parser.end();
  return value;
}

class Parser {
  readonly #text: string;
  #at = 0;

  constructor(text: string) {
    this.#text = text;
  }

  value(depth: number): Json {
    this.#skip();
    switch (this.#text[this.#at]) {
      case "{":
        return this.#object(depth + 1);
      case "[":
        return this.#list(depth + 1);
      case '"':
        return this.#string();
      case "t":
        return this.#word("true", true);
      case "f":
        return this.#word("false", false);
      case "n":
        return this.#word("null", null);
      default:
        return this.#number();
    }
  }

  end(): void {
    this.#skip();
    if (this.#at !== this.#text.length) this.#fail("text after the value");
  }

  #object(depth: number): JsonObject {
    const found: JsonObject = new Map();
    this.#open(depth);
    if (this.#takes("}")) return found;
    do {
      this.#skip();
      const key = this.#string();
      if (found.has(key)) this.#fail("a key is duplicated");
      if (!this.#takes(":")) this.#fail("no colon after a key");
      found.set(key, this.value(depth));
    } while (this.#takes(","));
    if (!this.#takes("}")) this.#fail("an object does not end");
    return found;
  }

  #list(depth: number): Json[] {
    const found: Json[] = [];
    this.#open(depth);
    if (this.#takes("]")) return found;
    do found.push(this.value(depth));
    while (this.#takes(","));
    if (!this.#takes("]")) this.#fail("a list does not end");
    return found;
  }

  #open(depth: number): void {
    if (depth > MAX_DEPTH) this.#fail(`more than ${MAX_DEPTH} levels`);
    this.#at += 1;
  }

  #string(): string {
    const found = this.#match(STRING);
    if (found === null) return this.#fail("no string");
    const inner = found[1] as string;
    return inner.includes("\\") ? (JSON.parse(found[0]) as string) : inner;
  }

  #number(): number | OtherNumber {
    const found = this.#match(NUMBER);
    if (found === null) return this.#fail("no value");
    const number = Number(found[0]);
    const isInteger = found[1] === undefined && found[2] === undefined;
    return isInteger && Number.isSafeInteger(number) ? number + 0 : new OtherNumber();
  }

  #word<T>(word: string, value: T): T {
    if (!this.#text.startsWith(word, this.#at)) this.#fail("no value");
    this.#at += word.length;
    return value;
  }

  #takes(character: string): boolean {
    this.#skip();
    const isNext = this.#text[this.#at] === character;
    if (isNext) this.#at += 1;
    return isNext;
  }

  #skip(): void {
    this.#match(SPACE);
  }

  #match(pattern: RegExp): RegExpExecArray | null {
    pattern.lastIndex = this.#at;
    const found = pattern.exec(this.#text);
    if (found !== null) this.#at = pattern.lastIndex;
    return found;
  }

  #fail(why: string): never {
    throw new SyntaxError(`${why} at character ${this.#at}`);
  }
}
