// Members of a group as processes of their own, in Node and in Python, which tests may kill.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const running = new Set();

/** Start a member. `language` is "node" or "python". It ends with the group's epoch. */
export function startMember(language, options) {
  const given = JSON.stringify({ pause_s: 0.05, lease_s: 3, ...options });
  const command =
    language === "node" ? [process.execPath, "js/test/member.mjs"] : [".venv/bin/python", "js/test/peer.py", "member"];
  const env = { ...process.env, PYTHONPATH: "common:producer:consumer:front:." };
  const stdio = ["ignore", "pipe", "pipe"];
  const child = spawn(command[0], [...command.slice(1), given], { cwd: ROOT, env, stdio });
  const member = { child, given: [], acknowledged: [], said: "", isJoined: false, hasLeft: false };
  const waiters = new Set();
  const changed = () => {
    for (const wake of waiters) wake();
  };
  createInterface({ input: child.stdout }).on("line", (line) => {
    const told = JSON.parse(line);
    if ("joined" in told) member.isJoined = true;
    if (told.given) member.given.push(told.given);
    if (told.acknowledged) member.acknowledged.push(told.acknowledged);
    if (told.left) member.hasLeft = true;
    changed();
  });
  child.stderr.on("data", (text) => {
    member.said += text;
  });
  member.ended = new Promise((resolve) => {
    child.once("close", () => {
      running.delete(member);
      changed();
      resolve();
    });
  });
  running.add(member);
  /** Wait until something holds of the member. */
  member.until = async (holds) => {
    while (!holds(member)) {
      if (!running.has(member)) throw new Error(`the ${language} member ended: ${member.said}`);
      await new Promise((resolve) => {
        const wake = () => {
          waiters.delete(wake);
          resolve();
        };
        waiters.add(wake);
      });
    }
  };
  /** End it at once, without a chance to say good-bye. */
  member.kill = async () => {
    child.kill("SIGKILL");
    await member.ended;
  };
  return member;
}

/** End what a failed test left running. */
export async function killAll() {
  await Promise.all([...running].map((member) => member.kill()));
}

/** Each identity as text, of batches as members tell them. */
export function names(batches) {
  return batches.flat().map((identity) => identity.join("/"));
}

/** Every identity of an epoch of shards of these sizes, as text. */
export function all(sizes, epoch = 0) {
  return sizes.flatMap((size, shard) => Array.from({ length: size }, (_, offset) => `${epoch}/${shard}/${offset}`));
}

/** The texts that occur more than once. */
export function repeated(texts) {
  return [...new Set(texts.filter((one, at) => texts.indexOf(one) !== at))];
}

/**
 * Keep the keys of a hash tag as they are now. Returns what brings them back, as a replica that lacks the rest does.
 * With `isLast` the server answers nobody from then on: it is to be killed, and comes back with these keys.
 */
export async function slotState(client, tag) {
  const own = () => client.keys(`penstock:{${tag}}:*`);
  const kept = await own();
  for (const key of kept) await client.sendCommand(["COPY", key, `kept:${key}`]);
  return async ({ isLast = false } = {}) => {
    const transaction = client.multi().del(await own());
    for (const key of kept) transaction.addCommand(["COPY", `kept:${key}`, key]);
    if (isLast) transaction.addCommand(["CLIENT", "PAUSE", "60000"]);
    await transaction.exec();
  };
}
