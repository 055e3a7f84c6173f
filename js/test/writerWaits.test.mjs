// What a writer does while there is no space or no server, and how it shares a feed.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { createClient } from "@redis/client";
import { BudgetFull, load, openWriter, replay, StreamDeleted } from "../dist/index.js";
import { explainMemory, explainQuota } from "../dist/write/explain.js";
import { decide, missingBytes, pauseMs } from "../dist/write/quota.js";
import { all, killAll, names, startMember } from "./members.mjs";
import { startPeer } from "./peer.mjs";

const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));
const open = [];
let peer;
let client;

before(async () => {
  peer = await startPeer();
  client = createClient({ url: peer.url });
  await client.connect();
});

after(async () => {
  client.destroy();
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

afterEach(async () => {
  await killAll();
  for (const one of open.splice(0)) await one.close().catch(() => {});
});

async function begin(stream, options = {}) {
  const said = [];
  const writer = await openWriter(stream, { url: peer.url, notify: (line) => said.push(line), ...options });
  open.push(writer);
  return Object.assign(writer, { said });
}

async function audit(stream, url = peer.url) {
  const { clean, findings, ...counts } = await peer.ask("audit_report", { stream, url });
  assert.deepEqual(findings, []);
  assert.ok(clean);
  return counts;
}

/** Run a command of Python's `penstock`. */
async function command(...words) {
  await peer.ask("command", { words, url: peer.url });
}

/** Every value of `n` in an epoch, in order. */
async function numbers(stream, epoch, url = peer.url) {
  const source = replay(stream, { epoch, batchSize: 100_000, url });
  const found = [];
  for await (const { tensors } of source) found.push(...tensors.n.data);
  await source.close();
  return found;
}

// --- the plans ---

test("a block is admitted or waits as in Python, with the same sentences", async () => {
  const states = [];
  for (const heldBytes of [0, 5_000_000, 7_000_000, 7_500_001, 9_999_999]) {
    for (const blockBytes of [1, 600_000, 2_500_000]) {
      for (const isNext of [false, true]) {
        for (const waitedMs of [null, 0, 999, 1000]) {
          for (const leftBytes of [null, -5, 0, 700_000, 10 ** 9]) {
            for (const partition of [null, 3]) {
              states.push({ heldBytes, blockBytes, budgetBytes: 10_000_000, isNext, waitedMs, leftBytes, partition });
            }
          }
        }
      }
    }
  }
  const keepers = [
    { blockers: [], hasGroups: false, unacknowledged: new Map(), missing: [], isKept: false },
    { blockers: ["a", "b"], hasGroups: true, unacknowledged: new Map(), missing: [], isKept: false },
    { blockers: [], hasGroups: true, unacknowledged: new Map([["b", 2000], ["a", 9_000_000]]), missing: [], isKept: false },
    { blockers: [], hasGroups: true, unacknowledged: new Map(), missing: ["rank-1 of group a (not there)"], isKept: false },
    { blockers: [], hasGroups: true, unacknowledged: new Map(), missing: [], isKept: true },
    { blockers: [], hasGroups: true, unacknowledged: new Map(), missing: [], isKept: false },
  ]; // biome-ignore format: one case a line
  const wanted = await peer.ask("quota_plans", {
    states: states.map((one) => ({
      held_bytes: one.heldBytes,
      block_bytes: one.blockBytes,
      budget_bytes: one.budgetBytes,
      is_next: one.isNext,
      waited_s: one.waitedMs === null ? null : one.waitedMs / 1000,
      left_bytes: one.leftBytes,
      partition: one.partition,
    })),
    keepers: keepers.map(({ blockers, hasGroups, unacknowledged, missing, isKept }) => ({
      blockers,
      has_groups: hasGroups,
      unacknowledged: Object.fromEntries(unacknowledged),
      gone: missing.join(", "),
      is_kept: isKept,
    })),
  });
  const memory = { usedBytes: 3_000_000, limitBytes: 2 ** 26, policy: "noeviction" };
  memory.leftBytes = Math.floor(2 ** 26 * 0.9) - 2 ** 24 - memory.usedBytes;
  const found = states.map((state) => [
    [decide(state), decide(state, true)],
    missingBytes(state),
    [...keepers.map((one) => explainQuota("s", state, one)), explainMemory("s", state, memory)],
  ]);
  assert.equal(new Set(found.map(([[decision]]) => decision)).size, 4);
  assert.deepEqual(found, wanted);
});

test("a writer that waits looks as often as Python's", async () => {
  const waits = [[0, 0], [8, 0], [30, 100], [600, 0], [9000, 0], [5, 9000]]; // biome-ignore format: pairs
  const wanted = await peer.ask("pauses", { waits: waits.map((pair) => pair.map((ms) => ms / 1000)) });
  assert.deepEqual(
    waits.map((pair) => pauseMs(...pair)),
    wanted.map((seconds) => 1000 * seconds),
  );
});

test("a refusal is Python's sentence", async () => {
  const spec = { x: ["float32", [2]], y: ["int64", []] };
  const epoch = await (await begin("refused", { spec })).epoch();
  const x = new Float32Array(2);
  const bad = [
    { x: { data: new Float32Array(3), shape: [3] }, y: 1 },
    { x: new Float64Array(2), y: 1 },
    { x, y: 0.5 },
    { x },
    { x, y: 1, z: 1 },
  ];
  const said = [];
  for (const sample of bad) await epoch.write(sample).catch(({ message }) => said.push(message));
  await begin("refused", { spec: { x: ["uint8", [5]] } }).catch(({ message }) => said.push(message));
  const wanted = await peer.ask("refusals", { stream: "refused", url: peer.url });
  // a remedy is in the words of the language
  const bare = (text) => text.split(/; (?:convert it|a size that differs)|: write to a stream of another name/)[0];
  assert.deepEqual(said.map(bare), wanted.map(bare));
  assert.equal(said.length, 6);
});

// --- room ---

const BYTES = 500;
const spec = { x: ["uint8", [BYTES]] };

/** Write samples to a planned shard until there is no space, and return what the error says. */
async function untilFull(writer, number, most) {
  const shard = await (await writer.epoch(0)).shard(number);
  const write = async () => {
    for (let at = 0; at < most; at += 1) await shard.write({ x: new Uint8Array(BYTES) });
    await shard.flush();
  };
  const error = await write().then(() => null, (failure) => failure); // biome-ignore format: short
  shard.abort();
  assert.ok(error instanceof BudgetFull, String(error));
  return error.message;
}

for (const partitions of [1, 2]) {
  test(`a full budget is told in Python's sentences, with ${partitions} partitions`, async () => {
    const stream = `full-${partitions}`;
    const options = { spec, partitions, budgetBytes: 40_000 * partitions, blockBytes: 1000, roomWaitMs: 300 };
    const writer = await begin(stream, options);
    await writer.epoch(0, { sizes: [1000, 1000, 1000] });
    const untold = (text) => text.replace(/seen for \d+ s/, "seen for some time");
    const askBoth = async (shard) => {
      const said = await untilFull(writer, shard, 100);
      assert.equal(untold(said), untold(await peer.ask("full", { stream, url: peer.url, shard, most: 100 })));
      return said;
    };
    const unread = /is full \(39 KiB of 39 KiB\) and no group reads it: start a trainer/;
    assert.match(await askBoth(0), unread);
    const left = load(stream, { group: "left", batchSize: 10, url: peer.url });
    await left.open();
    await left.close();
    assert.match(await askBoth(0), unread);
    await command("groups", "declare", stream, "g");
    assert.match(await askBoth(0), /because of group g: it has yet to read; no trainer of group 'g' was seen/);
    assert.match(await askBoth(partitions), /of 39 KiB\) because of group g/);
    await writer.close();
  });
}

test("a full budget waits and says so, and goes on as a Python member acknowledges", async () => {
  const writer = await begin("goes-on", { spec, budgetBytes: 40_000, blockBytes: 1000 });
  const epoch = await writer.epoch();
  const writing = (async () => {
    for (let at = 0; at < 300; at += 1) await epoch.write({ x: new Uint8Array(BYTES).fill(at) });
    await epoch.close();
  })();
  while (writer.said.length === 0) await new Promise((resolve) => setTimeout(resolve, 50));
  assert.match(writer.said[0], /^waiting: the budget of 'goes-on' is full \(39 KiB of 39 KiB\) and no group reads it/);
  const member = startMember("python", { stream: "goes-on", group: "g", batch_size: 10, url: peer.url, pause_s: 0 });
  await writing;
  await member.ended;
  assert.deepEqual(names(member.acknowledged).sort(), all([300]).sort(), member.said);
  const { produced } = await audit("goes-on");
  assert.equal(produced, 300);
  const bytes = await client.hGetAll((await client.keys("penstock:{goes-on.*}:roster"))[0]);
  assert.ok(Number(bytes.bytes) <= 40_000, bytes.bytes);
  await command("trim", "goes-on", "--keep", "0");
  assert.deepEqual((await peer.ask("facts", { stream: "goes-on", url: peer.url })).epochs, []);
});

test("ranks of an ordered group make room in two partitions", async () => {
  const writer = await begin("ordered-room", { spec, partitions: 2, budgetBytes: 200_000, blockBytes: 1000 });
  const sizes = [400, 400, 382];
  const epoch = await writer.epoch(0, { sizes });
  const options = { stream: "ordered-room", group: "g", batch_size: 2, url: peer.url, pause_s: 0 };
  const ranks = [0, 1].map((rank) => startMember("python", { ...options, rank: [rank, 2] }));
  for (const [number, size] of sizes.entries()) {
    const shard = await epoch.shard(number);
    for (let at = 0; at < size; at += 1) await shard.write({ x: new Uint8Array(BYTES) });
    await shard.close();
  }
  await Promise.all(ranks.map((member) => member.ended));
  const given = names(ranks.flatMap(({ acknowledged }) => acknowledged));
  const said = ranks.map((member) => member.said).join();
  assert.deepEqual([...new Set(given)].sort(), all(sizes).sort(), said);
  assert.equal(given.length, 1184, said); // samples of the epoch's start fill its last step
  const [key] = await client.keys("penstock:{ordered-room.*}:0:0:index");
  const index = await client.xRange(key, "-", "+");
  const entries = key.replace("0:0:index", "0:entries");
  const isThere = async ({ message }) => (await client.xRange(entries, message.e, message.e)).length === 1;
  assert.deepEqual(await Promise.all([0, 3, 4].map((at) => isThere(index[at]))), [true, true, false]); // 8 samples
  const { produced } = await audit("ordered-room");
  assert.equal(produced, 1182);
});

test("what a group has yet to read, or a pin holds, is not removed", async () => {
  const writer = await begin("kept", { spec, budgetBytes: 40_000, blockBytes: 1000, roomWaitMs: 300 });
  await writer.epoch(0, { sizes: [1000] });
  for (const group of ["quick", "slow"]) await command("groups", "declare", "kept", group);
  await untilFull(writer, 0, 100);
  await peer.ask("load", { stream: "kept", group: "quick", batch_size: 10, most: 6 });
  assert.match(await untilFull(writer, 0, 100), /because of group slow: it has yet to read/);
  const [entries] = await client.keys("penstock:{kept.*}:0:entries");
  const oldest = async () => (await client.sendCommand(["XRANGE", entries, "-", "+", "COUNT", "1"]))[0][0];
  const before = await oldest();
  await peer.ask("load", { stream: "kept", group: "slow", batch_size: 10, most: 4 });
  await command("epochs", "pin", "kept", "0");
  assert.match(await untilFull(writer, 0, 100), /epoch 0 is pinned, with 39 KiB: `penstock epochs unpin kept 0`/);
  assert.equal(await oldest(), before);
  await command("epochs", "unpin", "kept", "0");
  await untilFull(writer, 0, 100);
  const first = await oldest();
  const [index] = await client.keys("penstock:{kept.*}:0:0:index");
  const records = await client.xRange(index, "-", "+");
  const at = records.findIndex(({ message }) => message.e === first);
  // quick has acknowledged 60 samples or 50, slow 40 or 30: the last batch of a loop that is left counts as untrained
  assert.ok(at > 0 && Number(records[at].message.f) <= 40, records[at]?.message.f);
  // another run completes the shard, although entries that it did not write are gone
  const next = await begin("kept", { budgetBytes: 4_000_000 });
  const shard = await (await next.epoch(0)).shard(0);
  assert.ok(shard.position >= 80, `${shard.position}`);
  while (shard.position < 1000) await shard.write({ x: new Uint8Array(BYTES) });
  await shard.close();
  assert.equal((await audit("kept")).produced, 1000);
});

// --- feeds ---

const FEED = { n: ["int32", []], pad: ["uint8", [396]] };
const one = (n) => ({ n, pad: new Uint8Array(396) });

test("a feed is a row of epochs, and what is written is there once", async () => {
  const writer = await begin("feed", { spec: FEED, budgetBytes: 400_000, blockBytes: 2000 });
  for (let n = 0; n < 200; n += 1) await writer.write(one(n));
  await writer.writeBatch({ n: Int32Array.from({ length: 100 }, (_, at) => 200 + at), pad: new Uint8Array(39_600) });
  await writer.quarantine("made bad on purpose");
  assert.ok(writer.uncommitted > 0);
  await writer.flush();
  assert.equal(writer.uncommitted, 0);
  await writer.close();
  const { epochs } = await peer.ask("facts", { stream: "feed", url: peer.url });
  assert.deepEqual(
    epochs.map(([number, state, kind]) => [number, state, kind]),
    [0, 1, 2].map((number) => [number, "produced", "feed"]),
  );
  const found = [];
  for (const number of [0, 1, 2]) found.push(...(await numbers("feed", number)));
  assert.deepEqual(found, [...Array(300).keys()]);
  assert.deepEqual(await audit("feed"), { produced: 300, bad: 1, lost: 0, duplicate: 0 });
});

test("a Python member reads a feed while Node and Python write it", async () => {
  const writer = await begin("both-feed", { spec: { x: ["uint8", [3, 5]], y: ["int64", []] } });
  await writer.write({ x: new Uint8Array(15), y: 1 });
  await peer.ask("feed", { stream: "both-feed", samples: 40 });
  for (let at = 0; at < 59; at += 1) await writer.write({ x: new Uint8Array(15), y: at });
  await writer.close();
  const { batches } = await peer.ask("load", {
    stream: "both-feed",
    group: "g",
    start: "earliest",
    batch_size: 10,
    most: 10,
  });
  const found = batches.flatMap(([identities]) => identities.map(String));
  assert.equal(new Set(found).size, 100);
  const { produced } = await audit("both-feed");
  assert.equal(produced, 100);
});

test("a feed's shard that the server gave to another writer is left for the next one, with what was not committed", async () => {
  const [lost, other] = [await begin("moved", { spec: FEED }), await begin("moved")];
  for (let n = 0; n < 5; n += 1) await lost.write(one(n));
  const key = "penstock:{moved}:0:manifest";
  const [token] = Object.keys(await client.hGetAll(key)).filter((field) => field.startsWith("w:"));
  await client.hDel(key, [token, "next_shard"]); // as a server that came back from before it was taken
  for (let n = 100; n < 103; n += 1) await other.write(one(n));
  await other.flush();
  await lost.write(one(5));
  await lost.flush();
  assert.match(lost.said.join(), /another writer has that now: this one goes on in shard 1 of epoch 0/);
  await lost.close();
  await other.close();
  assert.deepEqual(await numbers("moved", 0), [100, 101, 102, 0, 1, 2, 3, 4, 5]);
  await audit("moved");
});

// --- the server ---

test("a server that is killed and comes back with its data has each sample once", async () => {
  const [url, port] = await peer.ask("start_server", { directory: folder });
  const writer = await begin("back", { url, spec: FEED, blockBytes: 2000 });
  const epoch = await writer.epoch(0, { sizes: [600] });
  const shard = await epoch.shard(0);
  for (let n = 0; n < 600; n += 1) {
    if (n % 200 === 100) {
      await peer.ask("kill_server");
      await shard.write(one(n)); // into the block that is gathered
      await peer.ask("start_server", { directory: folder, port });
    } else await shard.write(one(n));
  }
  await peer.ask("kill_server");
  const closed = shard.close();
  while (writer.said.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  await peer.ask("start_server", { directory: folder, port });
  await closed;
  await writer.close();
  assert.match(
    writer.said[0],
    /^the connection broke while (writing|asking the server) \(.*\); trying again for 60 s$/,
  );
  assert.deepEqual(await numbers("back", 0, url), [...Array(600).keys()]);
  assert.deepEqual(await audit("back", url), { produced: 600, bad: 0, lost: 0, duplicate: 0 });
  await peer.ask("kill_server");
});

test("a replica that stands still is waited for without end, and named", async () => {
  const [url] = await peer.ask("start_server", { directory: mkdtempSync(join(folder, "primary-")) });
  const replica = await peer.ask("start_replica");
  const writer = await begin("safe", { url, spec: FEED, durability: "replicas=1" });
  const epoch = await writer.epoch();
  await epoch.write(one(0));
  await epoch.flush();
  assert.deepEqual(writer.said, []);
  const clock = performance.now;
  process.kill(replica, "SIGSTOP");
  try {
    await epoch.write(one(1));
    let hasEnded = false;
    const flushed = epoch.flush().finally(() => {
      hasEnded = true;
    });
    for (let minutes = 1; minutes <= 3; minutes += 1) {
      performance.now = () => clock.call(performance) + 60_000 * minutes;
      while (writer.said.length < minutes && !hasEnded) await new Promise((resolve) => setTimeout(resolve, 50));
    }
    assert.equal(hasEnded, false);
    for (const line of writer.said) {
      assert.match(line, /^waiting: durability 'replicas=1': 0 of 1 replicas have it$/);
    }
    const second = await begin("safe", { url }); // the level is the stream's, and no later writer is refused for it
    await second.close();
    process.kill(replica, "SIGCONT");
    await flushed;
  } finally {
    performance.now = clock;
    process.kill(replica, "SIGCONT");
  }
  await epoch.close();
  assert.deepEqual(await numbers("safe", 0, url), [0, 1]);
  assert.deepEqual(await audit("safe", url), { produced: 2, bad: 0, lost: 0, duplicate: 0 });
  await writer.close();
  await peer.ask("kill_server");
  await peer.ask("kill_server");
});

test("a server that comes back without the stream is told, and nothing is written there", async () => {
  const writer = await begin("forgotten", { spec: FEED });
  const epoch = await writer.epoch();
  await epoch.write(one(0));
  await epoch.flush();
  const keys = await client.keys("penstock:{forgotten*");
  await client.del(keys);
  await epoch.write(one(1));
  await assert.rejects(epoch.flush(), (error) => error instanceof StreamDeleted && /lost its data/.test(error.message));
  assert.deepEqual(await client.keys("penstock:{forgotten*"), []);
});

test("a server that stands still is named within 5 s, and gone on with", async () => {
  const writer = await begin("still", { spec: FEED });
  const epoch = await writer.epoch();
  await epoch.write(one(0));
  await client.sendCommand(["CLIENT", "PAUSE", "4000", "ALL"]);
  await epoch.close();
  assert.match(
    writer.said[0],
    /^waiting: no answer from redis:.* for 2\.\d s: is it stopped, overloaded or cut off\?$/,
  );
  assert.deepEqual(await numbers("still", 0), [0]);
});
