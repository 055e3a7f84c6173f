// Decompression of payload fields that are zstd frames, and the bounds that are checked before memory is taken.

import { BadEntry, UnsupportedVersion } from "../errors.js";

/** What this module uses of `node:zlib`, whose zstd the types of Node 20 lack. */
interface Zlib {
  zstdDecompressSync?(frame: Uint8Array, options: { chunkSize: number; maxOutputLength: number }): Uint8Array;
}

const MAGIC = 0xfd2fb528;
const LEAST_HEAD = 6;
const LEAST_WINDOW = 1024;
const LEAST_CHUNK = 64;
const RLE = 1;
// a page has no such module, and bundlers do not see this call
const zlib = globalThis.process?.getBuiltinModule?.("node:zlib") as Zlib | undefined;

/**
 * Return a tensor's bytes, of which the header's shapes announce `size`. The frame's claims are compared before memory
 * is taken.
 *
 * @throws BadEntry for a frame of another size or form, UnsupportedVersion where this program has no zstd.
 */
export function unpackZstd(tensor: string, frame: Uint8Array, size: number): Uint8Array {
  if (zlib?.zstdDecompressSync === undefined) {
    throw new UnsupportedVersion(
      `tensor ${tensor} is compressed with zstd, which this program lacks: use Node 22.15 or newer. A page reads such a ` +
        "stream through 'penstock gateway', which decompresses",
    );
  }
  if (frame.length >= size) {
    throw new BadEntry(`tensor ${tensor} is compressed to ${frame.length} bytes, its shapes say ${size}`);
  }
  const why = whyNotRead(frame, size);
  if (why !== null) throw new BadEntry(`tensor ${tensor}: ${why}; its shapes say ${size} bytes`);
  let data: Uint8Array;
  try {
    // one byte more, because Node takes another chunk once one is full
    const chunkSize = Math.max(LEAST_CHUNK, size + 1);
    data = zlib.zstdDecompressSync(frame, { chunkSize, maxOutputLength: chunkSize });
  } catch (error) {
    throw new BadEntry(`tensor ${tensor}: ${(error as Error).message.slice(0, 200)}`);
  }
  if (data.length !== size) throw new BadEntry(`tensor ${tensor} has ${data.length} bytes, expected ${size}`);
  return data;
}

/** Return why this is not one frame of `size` bytes, or null. Blocks are walked over and not read. */
function whyNotRead(frame: Uint8Array, size: number): string | null {
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  if (frame.length < LEAST_HEAD || view.getUint32(0, true) !== MAGIC) return "this is no zstd frame";
  const descriptor = view.getUint8(4);
  const isSingle = (descriptor & 0x20) !== 0;
  const idBytes = [0, 1, 2, 4][descriptor & 3] as number;
  const sizeFlag = descriptor >> 6;
  const sizeBytes = sizeFlag === 0 ? Number(isSingle) : 1 << sizeFlag;
  const idAt = isSingle ? 5 : 6;
  const sizeAt = idAt + idBytes;
  let at = sizeAt + sizeBytes;
  if (frame.length < at) return "the zstd frame is cut off";
  if (frame.subarray(idAt, sizeAt).some((byte) => byte > 0)) return "the zstd frame needs a dictionary";
  const content = contentSize(view, sizeAt, sizeBytes);
  const window = isSingle ? content : 2 ** (10 + (view.getUint8(5) >> 3)) * (1 + (view.getUint8(5) & 7) / 8);
  if (content !== size || window > Math.max(size, LEAST_WINDOW)) {
    return `the zstd frame claims ${content} bytes, a window of ${window}`;
  }
  for (let isLast = false; !isLast; ) {
    if (frame.length < at + 3) return "the zstd frame is cut off";
    const head = view.getUint16(at, true) + (view.getUint8(at + 2) << 16);
    isLast = (head & 1) !== 0;
    at += 3 + (((head >> 1) & 3) === RLE ? 1 : head >> 3);
  }
  if ((descriptor & 4) !== 0) at += 4;
  return at === frame.length ? null : `the zstd frame ends at ${at} of ${frame.length} bytes`;
}

/** Return the content size of a frame, or NaN where it has none. */
function contentSize(view: DataView, at: number, bytes: number): number {
  if (bytes === 1) return view.getUint8(at);
  if (bytes === 2) return view.getUint16(at, true) + 256;
  if (bytes === 4) return view.getUint32(at, true);
  return bytes === 8 ? Number(view.getBigUint64(at, true)) : Number.NaN;
}
