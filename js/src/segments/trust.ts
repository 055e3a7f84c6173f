// The check whether another user of the host could replace a folder of segments or a component of its path.

import { lstat, readFile, readlink } from "node:fs/promises";
import { dirname, isAbsolute, join } from "node:path";

const MAX_LINKS = 40;
const TYPE = 0o170000;
const FOLDER = 0o040000;
const LINK = 0o120000;
const SETGID = 0o2000;
const STICKY = 0o1000;
const GROUP_WRITES = 0o020;
const OTHERS_WRITE = 0o002;

/** One component that the kernel passes on the way to a path. */
interface Step {
  readonly path: string;
  readonly uid: number;
  readonly gid: number;
  readonly mode: number;
}

/**
 * Return why a reader may not trust a stream's folder, or null where it may. The rules are those of docs/segments.md.
 *
 * @param root The folder that the stream's setting names.
 * @param folder The stream's folder in it.
 */
export async function whyNotRead(root: string, folder: string): Promise<string | null> {
  const way = await walk(root);
  const [end] = (await walk(folder)).slice(-1) as [Step];
  const last = way.at(-1) as Step;
  const [uid, groups] = [
    process.geteuid?.() ?? 0,
    new Set([process.getegid?.() ?? 0, ...(process.getgroups?.() ?? [])]),
  ];
  const owners = new Set([uid, 0, (way[0] as Step).uid]);
  const writers = new Set(owners);
  const isShared = last.mode & SETGID && !(last.mode & OTHERS_WRITE) && (uid === 0 || groups.has(last.gid));
  if (isShared) {
    owners.add(last.uid);
    writers.add(last.uid).add(end.uid);
  }
  const closed = await privateGroups(writers);
  const isOpen = ({ mode, gid }: Step) =>
    (mode & TYPE) === FOLDER && ((mode & GROUP_WRITES && !closed.has(gid)) || mode & OTHERS_WRITE);
  const weak =
    way.find((step) => !owners.has(step.uid) || (!(step.mode & STICKY) && isOpen(step))) ??
    (!writers.has(end.uid) || isOpen(end) ? end : undefined);
  if (weak === undefined) return null;
  const told = `${weak.path} (user ${weak.uid}, group ${weak.gid}, mode ${(weak.mode & 0o7777).toString(8)})`;
  if (owners.has(weak.uid) && isOpen(weak)) {
    return `other users can replace the files in ${told}: remove that right (chmod go-w), or name another folder`;
  }
  return `${told} belongs to another user, who can replace its files: run as user ${weak.uid}, or give the root a group that both users belong to (docs/segments.md)`;
}

/** Return the components of an absolute path, those of symlinks' targets included. */
async function walk(path: string): Promise<Step[]> {
  const steps = [await stepOf("/")];
  const left = path.split("/").filter(Boolean).reverse();
  let here = "/";
  for (let links = 0; left.length > 0; ) {
    const name = left.pop() as string;
    if (name === "." || name === "..") {
      if (name === "..") here = dirname(here);
      continue;
    }
    const step = await stepOf(join(here, name));
    steps.push(step);
    if ((step.mode & TYPE) !== LINK) {
      here = step.path;
      continue;
    }
    links += 1;
    if (links > MAX_LINKS) throw new Error(`${path} leads through more than ${MAX_LINKS} symlinks`);
    const target = await readlink(step.path);
    if (isAbsolute(target)) here = "/";
    left.push(...target.split("/").filter(Boolean).reverse());
  }
  return steps;
}

async function stepOf(path: string): Promise<Step> {
  const { uid, gid, mode } = await lstat(path);
  return { path, uid, gid, mode };
}

/** Return the groups that have the name of one of these users and no other member. */
async function privateGroups(uids: ReadonlySet<number>): Promise<Set<number>> {
  const [users, groups] = await Promise.all(["/etc/passwd", "/etc/group"].map(linesOf));
  const found = new Set<number>();
  for (const [name, , uid, gid] of users as string[][]) {
    if (!uids.has(Number(uid))) continue;
    const group = (groups as string[][]).find((one) => one[2] === gid);
    const members = (group?.[3] ?? "").split(",").filter(Boolean);
    if (group?.[0] === name && members.every((member) => member === name)) found.add(Number(gid));
  }
  return found;
}

async function linesOf(path: string): Promise<string[][]> {
  try {
    return (await readFile(path, "utf8")).split("\n").map((line) => line.split(":"));
  } catch {
    return [];
  }
}
