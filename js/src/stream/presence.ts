// Members whose process has ended, if this host can tell: by boot, pid namespace, pid and start time. Incarnations get
// their names here.

import { randomBytes } from "node:crypto";
import { readFileSync, readlinkSync } from "node:fs";
import { createBLAKE2b } from "hash-wasm";
import type { MemberRecord } from "./roster.js";

/** A member that was seen more recently is alive, even if this host does not know its pid. */
const SILENT_MS = 2500;
/** A process with a heartbeat within it may be at work. */
export const ALIVE_MS = 30_000;
/** The end of a message that names who is at work: after a kill no fact on the server shows the end. */
export const GONE_AFTER = `one that has ended counts as gone at most ${ALIVE_MS / 1000} s after it was last seen`;
const NAMED = /^[^@]{1,100}@([0-9a-f]{16})\.([1-9][0-9]{0,6})\.([1-9][0-9]{0,18})$/;

const hasher = await createBLAKE2b(64);

/** Return a random name for one incarnation of a member, followed by the process where the host can tell it. */
export function newIncarnation(): string {
  const [name, where] = [randomBytes(8).toString("hex"), here()];
  const started = where === "" ? null : startTime(process.pid);
  return started ? `${name}@${where}.${process.pid}.${started}` : name;
}

/** Return the members of a group whose processes have ended for certain. */
export function endedMembers(members: readonly MemberRecord[], group: string, nowMs: number): MemberRecord[] {
  const where = here();
  return members.filter((one) => {
    const named = NAMED.exec(one.incarnation);
    if (one.group !== group || named === null || named[1] !== where || nowMs - one.seenMs < SILENT_MS) return false;
    const started = startTime(Number(named[2]));
    return started !== null && String(started) !== named[3];
  });
}

/** Return whether a member gave a heartbeat within a lease, and is not known to have ended. */
export function mayBeAtWork(member: MemberRecord, nowMs: number): boolean {
  return nowMs - member.seenMs < ALIVE_MS && endedMembers([member], member.group, nowMs).length === 0;
}

/** Return whether the name stands for entries that members returned, not for a process. */
export function isReturned(member: string): boolean {
  return member.startsWith("~");
}

/** Return when a process started, in clock ticks, 0 if there is none, or null if that is not known. */
function startTime(pid: number): number | null {
  try {
    process.kill(pid, 0); // /proc may hide other users' processes, the kernel does not
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ESRCH") return 0;
  }
  try {
    const text = readFileSync(`/proc/${pid}/stat`, "latin1");
    const fields = text
      .slice(text.lastIndexOf(")") + 1)
      .trim()
      .split(" ");
    const hasEnded = "ZX".includes(fields[0] as string) && Number(fields[17]) <= 1;
    return hasEnded ? 0 : Number(fields[19]);
  } catch {
    return null;
  }
}

let known: string | null = null;

/** Return the digest of this process's boot id and pid namespace, or "" if /proc does not show its own. */
function here(): string {
  if (known !== null) return known;
  try {
    if (readlinkSync("/proc/self") !== String(process.pid)) throw new Error("this /proc is of another namespace");
    const boot = readFileSync("/proc/sys/kernel/random/boot_id", "latin1").trim();
    known = hasher
      .init()
      .update(`${boot} ${readlinkSync("/proc/self/ns/pid")}`)
      .digest("hex");
  } catch {
    known = "";
  }
  return known;
}
