// The reader of segments: the folder, which `PENSTOCK_SEGMENTS` may name, the head of each file, and payloads read by
// their `ref`.

import { constants, type Stats } from "node:fs";
import { type FileHandle, open } from "node:fs/promises";
import { homedir } from "node:os";
import { join, resolve } from "node:path";
import { SegmentGone, SegmentsUnseen } from "../errors.js";
import type { Stream } from "../stream/stream.js";
import { digestOf } from "../wire/checksum.js";
import type { SegmentRef } from "../wire/header.js";
import { whyNotRead } from "./trust.js";

const INLINE = "inline";
const SEGMENTS = "segments:";
const MAGIC = "PENSTOCK";
const VERSION = 1;
const HEAD_BYTES = 24;
const MAX_INFO_BYTES = 2 ** 20;
const OPEN_FILES = 32;
const ALIGN = 64;
const FLAGS = constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK;
/** Errors of this process or host, not of the file. */
const OURS = new Set(["EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM"]);

interface OpenSegment {
  readonly file: FileHandle;
  readonly head: Buffer;
}

/**
 * Reads payloads of segment files. Node has no `flock`, so this reader holds no lock. It compares the head of the file
 * after each read instead: a writer that uses a file again changes the head first.
 */
export class SegmentReader {
  readonly #stream: Stream;
  readonly #root: string;
  readonly #folder: string;
  readonly #open = new Map<string, Promise<OpenSegment>>();

  private constructor(stream: Stream) {
    const named = process.env.PENSTOCK_SEGMENTS || stream.payload.slice(SEGMENTS.length);
    this.#stream = stream;
    this.#root = resolve(named.replace(/^~(?=\/|$)/, homedir()));
    this.#folder = join(this.#root, `${stream.name}.${stream.id}`);
  }

  /** Return the reader of a stream, or null if its payloads lie in the entries. Raises SegmentsUnseen. */
  static async of(stream: Stream): Promise<SegmentReader | null> {
    if (stream.payload === INLINE) return null;
    const reader = new SegmentReader(stream);
    await reader.require();
    return reader;
  }

  /** Raise SegmentsUnseen if this process does not see the folder, or cannot trust it. */
  async require(): Promise<void> {
    const { name, id, payload } = this.#stream;
    const what = `segments of '${name}' cannot be read from ${this.#folder}`;
    if (!payload.startsWith(SEGMENTS)) throw new SegmentsUnseen(`${what}: payload is '${payload}'`);
    let why: string | null;
    try {
      const mark = await open(join(this.#folder, "stream"), FLAGS);
      try {
        const found = (await mark.read(Buffer.alloc(ALIGN), 0, ALIGN, 0)).buffer.toString("latin1");
        why = found.replace(/\0+$/, "").trim() === id ? null : "it belongs to another stream";
      } finally {
        await mark.close();
      }
      why ??= await whyNotRead(this.#root, this.#folder);
    } catch (error) {
      why = `${(error as Error).message}; set PENSTOCK_SEGMENTS to where this process sees the folder`;
    }
    if (why !== null) throw new SegmentsUnseen(`${what}: ${why}`);
  }

  /** Return the payload fields, in wire order. Raises SegmentGone. */
  async read(ref: SegmentRef): Promise<Uint8Array[]> {
    const { file, head } = await this.#segment(ref.file);
    const starts: number[] = [];
    let end = 0;
    for (const size of ref.sizes) {
      const start = Math.ceil(end / ALIGN) * ALIGN;
      starts.push(start);
      end = start + size;
    }
    const data = Buffer.from(new ArrayBuffer(end));
    try {
      await fill(file, data, ref.at);
      const now = Buffer.alloc(head.length);
      await fill(file, now, 0);
      if (!now.equals(head)) throw new Error("it has been used again");
    } catch (error) {
      await this.#forget(ref.file);
      throw new SegmentGone(`the payload is in ${ref.file}: ${(error as Error).message}`);
    }
    return ref.sizes.map((size, at) => data.subarray(starts[at], (starts[at] as number) + size));
  }

  /** Close every file. */
  async close(): Promise<void> {
    await Promise.all([...this.#open.keys()].map((name) => this.#forget(name)));
  }

  #segment(name: string): Promise<OpenSegment> {
    let found = this.#open.get(name);
    if (found === undefined) {
      found = openSegment(this.#folder, name);
      if (this.#open.size >= OPEN_FILES) void this.#forget(this.#open.keys().next().value as string);
    } else this.#open.delete(name);
    this.#open.set(name, found); // the last one is the one used last
    return found;
  }

  async #forget(name: string): Promise<void> {
    const found = this.#open.get(name);
    this.#open.delete(name);
    try {
      await (await found)?.file.close();
    } catch {
      // it was never open
    }
  }
}

async function openSegment(folder: string, name: string): Promise<OpenSegment> {
  let file: FileHandle;
  try {
    file = await open(join(folder, name), FLAGS);
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    const found = `the payload is in ${name}, which this process cannot open: ${message}`;
    throw OURS.has(code ?? "") ? new SegmentsUnseen(found) : new SegmentGone(found);
  }
  try {
    const stat: Stats = await file.stat();
    if (!stat.isFile()) throw new Error("it is no file");
    const first = Buffer.alloc(HEAD_BYTES);
    await fill(file, first, 0);
    const length = first.readUInt32LE(12);
    if (first.toString("latin1", 0, 8) !== MAGIC || first.readUInt32LE(8) !== VERSION || length > MAX_INFO_BYTES) {
      throw new Error("it does not begin like a segment of version 1");
    }
    const head = Buffer.alloc(HEAD_BYTES + length);
    await fill(file, head, 0);
    const info = head.subarray(HEAD_BYTES);
    if (BigInt(`0x${digestOf([info])}`) !== head.readBigUInt64LE(16)) throw new Error("its head is damaged");
    const { epoch, partition, token } = JSON.parse(info.toString("utf8"));
    if (`${epoch}-${partition}-${token}.seg` !== name) throw new Error("it has been used again");
    return { file, head };
  } catch (error) {
    await file.close();
    throw new SegmentGone(`the payload is in ${name}: ${(error as Error).message}`);
  }
}

async function fill(file: FileHandle, data: Uint8Array, at: number): Promise<void> {
  for (let done = 0; done < data.length; ) {
    const { bytesRead } = await file.read(data, done, data.length - done, at + done);
    if (bytesRead === 0) throw new Error("it ends before the payload does");
    done += bytesRead;
  }
}
