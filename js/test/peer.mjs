// The Python side of the tests, with a server of its own.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

/** Start a server, and a Python process that writes to it and reads from it. */
export async function startPeer() {
  const env = { ...process.env, PYTHONPATH: "common:producer:consumer:front:." };
  const child = spawn(".venv/bin/python", ["js/test/peer.py"], { cwd: ROOT, env, stdio: ["pipe", "pipe", "inherit"] });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const answer = async () => JSON.parse((await lines.next()).value ?? '{"error": "the Python side ended"}');
  const { url } = await answer();
  return {
    url,
    /** Call a function of peer.py. */
    async ask(name, options = {}) {
      const isReader = /^(replay|produce|load|audit|feed|digits)/.test(name);
      child.stdin.write(`${JSON.stringify([name, isReader ? { url, ...options } : options])}\n`);
      const { error, answer: found } = await answer();
      if (error !== undefined) throw new Error(error);
      return found;
    },
    async close() {
      child.stdin.end();
      await new Promise((resolve) => child.once("exit", resolve));
    },
  };
}

const digest = (data) =>
  createHash("sha256")
    .update(new Uint8Array(data.buffer, data.byteOffset, data.byteLength))
    .digest("hex")
    .slice(0, 16);

/** Identities and digests of a batch, as peer.py tells them. */
export function told(batch) {
  const tensors = Object.entries(batch.tensors).map(([name, { data, shapes }]) => {
    const digests = [digest(data)];
    if (shapes !== null) digests.push(digest(BigInt64Array.from(shapes, BigInt)));
    return [name, digests];
  });
  return [[...batch.identities()].map((one) => [...one]), Object.fromEntries(tensors)];
}
