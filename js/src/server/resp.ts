// RESP2, both ways: packs commands without a copy of large arguments, receives large values in place, and bounds the
// sizes in a reply.

import { printable } from "../printable.js";
import { SpareMemory } from "../spareMemory.js";

/** The bytes of small replies that one read may bring. */
const SCRATCH_BYTES = 65_536;
/** The bytes that the first read after a large value may bring: the next header, and little of its value. */
const BEHIND_LARGE_BYTES = 4096;
/** Values up to this size pass through the scratch buffer, so that one read brings several. */
const THROUGH_SCRATCH_BYTES = 16_384;
/** The most memory that a value may take before its bytes have come. */
const FIRST_ROOM_BYTES = 2 ** 20;
/** Sizes are rounded up to a multiple, so that values of similar sizes use the same memory. */
const ROUND_BYTES = 65_536;
/** The most memory that is kept for later values. */
const SPARE_BYTES = 16 * 2 ** 20;
/** The default of proto-max-bulk-len, and some slack. A server that announces more is broken. */
const MAX_VALUE_BYTES = 512 * 2 ** 20 + 65_536;
const MAX_ITEMS = 2 ** 22;
const MAX_DEPTH = 16;
const NUMBER = /^(0|-?[1-9][0-9]{0,18})$/;
const [CR, LF] = [13, 10];

/** An error that the server answered with. It is a value inside the answer of EXEC. */
export class ErrorReply extends Error {
  override readonly name = "ErrorReply";
}

interface OpenArray {
  readonly items: unknown[];
  readonly length: number;
}

/** A large value on its way, with the two bytes behind it. */
interface Incoming {
  memory: Buffer;
  received: number;
  readonly size: number;
}

/**
 * Parses RESP2. Large values are received in place: `room` is where the next bytes belong.
 *
 * Answers are numbers, strings (a status), Buffers, arrays, null and ErrorReply.
 */
export class RespReader {
  readonly #answered: (reply: unknown) => void;
  readonly #scratch = Buffer.allocUnsafeSlow(SCRATCH_BYTES);
  readonly #spare = new SpareMemory(SPARE_BYTES);
  /** The memory that this reader gave to large values. Small ones are in Node's pool, which other code uses, too. */
  readonly #own = new WeakSet<ArrayBufferLike>();
  readonly #open: OpenArray[] = [];
  #start = 0;
  #end = 0;
  #window = SCRATCH_BYTES;
  #incoming: Incoming | null = null;

  /** @param answered Takes each whole reply. */
  constructor(answered: (reply: unknown) => void) {
    this.#answered = answered;
  }

  /** Return the memory for the next bytes from the server. */
  room(): Buffer {
    const incoming = this.#incoming;
    if (incoming !== null) return incoming.memory.subarray(incoming.received, incoming.size);
    return this.#scratch.subarray(this.#end, Math.min(SCRATCH_BYTES, this.#end + this.#window));
  }

  /** Take the bytes that were received in `room()`. Raises RangeError if the server does not speak RESP2. */
  take(received: number): void {
    if (this.#incoming === null) {
      this.#end += received;
      this.#window = SCRATCH_BYTES;
    } else if (!this.#filled(this.#incoming, received)) return;
    while (this.#start < this.#end && this.#parseOne());
    this.#scratch.copyWithin(0, this.#start, this.#end);
    this.#end -= this.#start;
    this.#start = 0;
  }

  /** Receive later values in the memory of a large value. Nobody may use that value from now on. */
  recycle(value: Buffer): void {
    if (this.#own.has(value.buffer)) this.#spare.keep(value.buffer as ArrayBuffer);
  }

  #filled(incoming: Incoming, received: number): boolean {
    incoming.received += received;
    const { memory, size } = incoming;
    if (incoming.received < Math.min(memory.length, size)) return false;
    if (memory.length < size) {
      incoming.memory = Buffer.allocUnsafeSlow(Math.min(size, 2 * memory.length));
      memory.copy(incoming.memory);
      return false;
    }
    this.#incoming = null;
    this.#own.add(memory.buffer);
    this.#window = BEHIND_LARGE_BYTES;
    this.#push(withoutEnd(memory, size));
    return true;
  }

  /** Parse one line or value, and return whether it was there. */
  #parseOne(): boolean {
    const scratch = this.#scratch;
    const lineEnd = scratch.indexOf(LF, this.#start);
    if (lineEnd < 0 || lineEnd >= this.#end) {
      if (this.#end - this.#start === SCRATCH_BYTES) throw new RangeError("a line of a reply does not end");
      return false;
    }
    const [kind, start, next] = [scratch[this.#start] as number, this.#start + 1, lineEnd + 1];
    if (scratch[lineEnd - 1] !== CR) throw new RangeError("a line of a reply has no end");
    const text = scratch.toString("utf8", start, lineEnd - 1);
    if (kind === 0x24) return this.#parseValue(lengthOf(text, MAX_VALUE_BYTES), next);
    this.#start = next;
    if (kind === 0x3a) this.#push(numberOf(text));
    else if (kind === 0x2b) this.#push(text);
    else if (kind === 0x2d) this.#push(new ErrorReply(printable(text)));
    else if (kind === 0x2a) this.#parseArray(lengthOf(text, MAX_ITEMS));
    else throw new RangeError(`a reply of RESP2 begins with ${JSON.stringify(String.fromCharCode(kind))}`);
    return true;
  }

  #parseArray(length: number): void {
    if (length <= 0) this.#push(length < 0 ? null : []);
    else if (this.#open.push({ items: [], length }) > MAX_DEPTH) throw new RangeError("a reply has too many levels");
  }

  #parseValue(length: number, start: number): boolean {
    const [size, end] = [length + 2, start + length + 2];
    if (length < 0) {
      this.#start = start;
      this.#push(null);
    } else if (end <= this.#end) {
      this.#start = end;
      this.#push(withoutEnd(Buffer.from(this.#scratch.subarray(start, end)), size));
    } else if (length > THROUGH_SCRATCH_BYTES) {
      const memory = this.#memoryFor(size);
      this.#incoming = { memory, size, received: this.#scratch.copy(memory, 0, start, this.#end) };
      this.#start = this.#end;
    } else return false;
    return true;
  }

  /** Return memory for a value, or for the beginning of a large one. */
  #memoryFor(size: number): Buffer {
    const rounded = Math.ceil(size / ROUND_BYTES) * ROUND_BYTES;
    const spare = this.#spare.take(size, 2 * rounded);
    return spare ? Buffer.from(spare) : Buffer.allocUnsafeSlow(Math.min(rounded, FIRST_ROOM_BYTES));
  }

  #push(reply: unknown): void {
    for (let value = reply; ; ) {
      const open = this.#open.at(-1);
      if (open === undefined) {
        this.#answered(value);
        return;
      }
      open.items.push(value);
      if (open.items.length < open.length) return;
      this.#open.pop();
      value = open.items;
    }
  }
}

function withoutEnd(value: Buffer, size: number): Buffer {
  const length = size - 2;
  if (value[length] !== CR || value[length + 1] !== LF)
    throw new RangeError("a value has another length than announced");
  return value.subarray(0, length);
}

function numberOf(text: string): number {
  if (!NUMBER.test(text)) throw new RangeError(`${JSON.stringify(text.slice(0, 40))} is no number of RESP2`);
  return Number(text);
}

function lengthOf(text: string, most: number): number {
  const found = numberOf(text);
  if (found < -1 || found > most) throw new RangeError(`a reply announces a length of ${found}, the limit is ${most}`);
  return found;
}

/** Append a command to the pieces that are to be sent. Buffers are not copied. */
export function pack(args: readonly (string | Buffer)[], pieces: (string | Buffer)[]): void {
  let text = typeof pieces.at(-1) === "string" ? (pieces.pop() as string) : "";
  text += `*${args.length}\r\n`;
  for (const one of args) {
    if (typeof one === "string") {
      text += `$${Buffer.byteLength(one)}\r\n${one}\r\n`;
      continue;
    }
    pieces.push(`${text}$${one.length}\r\n`, one);
    text = "\r\n";
  }
  pieces.push(text);
}
