// Slots of a cluster: the slot of a key, and which argument of a command is its key. Pure: no connection and no clock.

/** The slots of a cluster, by the Redis Cluster specification. */
export const SLOTS = 16_384;

const SCRIPTS = new Set(["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"]);
const READS = new Set(["XREAD", "XREADGROUP"]);
/** Commands of two words, whose key is the third. */
const SECOND_WORDS = new Set(["XINFO", "XGROUP"]);
const KEYLESS = new Set(
  "AUTH CLIENT CLUSTER CONFIG EXEC HELLO INFO MULTI PING ROLE SCAN SCRIPT SELECT TIME WAIT WAITAOF".split(" "),
);

/** Return a key's slot: the CRC16 of its hash tag, or of the whole key if it has none. */
export function slotOf(key: string): number {
  const start = key.indexOf("{");
  const end = key.indexOf("}", start + 1);
  const tag = start >= 0 && end > start + 1 ? key.slice(start + 1, end) : key;
  return crc16(Buffer.from(tag)) % SLOTS;
}

/** Return the first key of a command, or undefined for a command without keys. */
export function keyOf(command: readonly (string | number | Buffer)[]): string | undefined {
  const name = String(command[0]).toUpperCase();
  if (KEYLESS.has(name)) return undefined;
  let at = SECOND_WORDS.has(name) ? 2 : 1;
  if (READS.has(name)) at = command.indexOf("STREAMS") + 1;
  else if (SCRIPTS.has(name)) at = 3;
  return at < command.length ? String(command[at]) : undefined;
}

function crc16(bytes: Uint8Array): number {
  let crc = 0;
  for (const byte of bytes) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit += 1) crc = crc & 0x8000 ? ((crc << 1) ^ 0x1021) & 0xffff : (crc << 1) & 0xffff;
  }
  return crc;
}
