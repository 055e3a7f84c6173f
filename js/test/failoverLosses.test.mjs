// A primary dies whose replica lacks the newest writes: writers in Node send again what no replica had, and name what is lost.
import assert from "node:assert/strict";
import { after, afterEach, before, test } from "node:test";
import { load, openWriter, replay, ShardMismatch } from "../dist/index.js";
import { startPeer } from "./peer.mjs";

const SPEC = { x: ["int64", []] };
/** Samples that the replica has, samples at the failover, and samples in the end. */
const [FIRST, CUT, ALL] = [100, 200, 300];
const range = (end) => Array.from({ length: end }, (_, number) => number);
let peer;

before(async () => {
  peer = await startPeer();
});

after(async () => {
  await peer.close();
});

const closing = [];

afterEach(async () => {
  for (const close of closing.splice(0).reverse()) await close();
});

async function started(kind, options = {}) {
  const found = await peer.ask(`start_${kind}`, options);
  closing.push(() => peer.ask(`end_${kind}`));
  return Array.isArray(found) ? found[0] : found;
}

/** A writer with four samples in a block, and what it said. */
async function begin(url, durability, options = {}) {
  const said = [];
  const notify = (line) => said.push(line);
  const writer = await openWriter("torn", { url, spec: SPEC, blockBytes: 32, durability, notify, ...options });
  return Object.assign(writer, { said });
}

async function write(target, first, end) {
  for (let number = first; number < end; number += 1) await target.write({ x: number });
}

async function writeTorn(target) {
  await write(target, 0, FIRST);
  await target.flush();
  await peer.ask("cut_off_service");
  await write(target, FIRST, CUT);
}

async function writeTornShard(shard) {
  await write(shard, 0, FIRST);
  await shard.commitAll();
  await peer.ask("cut_off_service");
  await write(shard, FIRST, CUT);
}

async function failOver() {
  await peer.ask("fail_over");
  await peer.ask("follow_service");
}

async function requireAll(url, count, epochs = 1) {
  const found = [];
  for (let epoch = 0; epoch < epochs; epoch += 1) {
    const samples = replay("torn", { epoch, batchSize: 50, url });
    for await (const { tensors } of samples) found.push(...[...tensors.x.data].map(Number));
    await samples.close();
  }
  assert.deepEqual(
    found.sort((a, b) => a - b),
    range(count),
  );
  assert.deepEqual((await peer.ask("audit_report", { stream: "torn", url })).findings, []);
}

async function untilSaid(said, words) {
  for (const end = Date.now() + 60_000; !said.some((line) => line.includes(words)) && Date.now() < end; ) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.ok(
    said.some((line) => line.includes(words)),
    `${words}: ${said.join("\n")}`,
  );
}

for (const level of ["auto", "replicas=1"]) {
  test(`an epoch loses nothing that no replica had (${level})`, async () => {
    const url = await started("service");
    const writer = await begin(url, level);
    const epoch = await writer.epoch();
    await writeTorn(epoch);
    await failOver();
    await write(epoch, CUT, ALL);
    await epoch.close();
    await requireAll(url, ALL);
    assert.equal(writer.said.filter((line) => line.includes("sending them again")).length, 1, writer.said.join("\n"));
    await writer.close();
  });

  for (const beginsCut of [false, true]) {
    test(`a feed loses nothing that no replica had (${level}, epoch ${beginsCut ? "lost" : "kept"})`, async () => {
      const url = await started("service");
      const writer = await begin(url, level);
      if (beginsCut) {
        await peer.ask("cut_off_service");
        await write(writer, 0, CUT);
      } else await writeTorn(writer);
      await failOver();
      await write(writer, CUT, ALL);
      await writer.close();
      await requireAll(url, ALL);
    });
  }

  test(`a shard that waits at its end is sent again (${level})`, async () => {
    const url = await started("service");
    const writer = await begin(url, level);
    const epoch = await writer.epoch(0, { sizes: [CUT] });
    const shard = await epoch.shard(0);
    await writeTornShard(shard);
    const closed = shard.close();
    closed.catch(() => {}); // the error is raised where it is awaited
    await untilSaid(writer.said, "0 of 1 replicas have it");
    await failOver();
    await closed;
    assert.equal(shard.position, CUT);
    await requireAll(url, CUT);
    await writer.close();
  });
}

test("a replica that was given up may take over", async () => {
  const url = await started("service");
  const writer = await begin(url, "auto");
  const epoch = await writer.epoch(0, { sizes: [ALL] });
  const shard = await epoch.shard(0);
  await writeTornShard(shard);
  await shard.commitAll(); // it waits 10 s for the replica
  await untilSaid(writer.said, "no replica of");
  await write(shard, CUT, CUT + 20);
  await shard.flush();
  await failOver();
  await write(shard, CUT + 20, ALL);
  await shard.close();
  await requireAll(url, ALL);
  await writer.close();
});

test("a primary that just took over may lose what it wrote without a replica", async () => {
  const url = await started("service");
  const writer = await begin(url, "auto");
  const epoch = await writer.epoch();
  await write(epoch, 0, FIRST);
  await epoch.flush();
  await peer.ask("fail_service", { fault: "kill" });
  await write(epoch, FIRST, FIRST + 8);
  await epoch.flush();
  await peer.ask("remember", { stream: "torn", url });
  await write(epoch, FIRST + 8, CUT);
  await epoch.flush();
  await peer.ask("go_back", { url });
  await write(epoch, CUT, ALL);
  await epoch.close();
  await requireAll(url, ALL);
  assert.equal(writer.said.filter((line) => line.includes("sending them again")).length, 1, writer.said.join("\n"));
  await writer.close();
});

test("memory names what is lost, with the server, the time and the offsets", async () => {
  const url = await started("service");
  const writer = await begin(url, "memory");
  const epoch = await writer.epoch();
  await writeTorn(epoch);
  await failOver();
  const lost = async () => {
    await write(epoch, CUT, ALL);
    await epoch.close();
  };
  await assert.rejects(lost(), (error) => {
    assert.ok(error instanceof ShardMismatch, String(error));
    assert.match(
      error.message,
      /lost data, and with it \d+ samples .*offsets 100-\d+, noticed at 20.* UTC, at .*:\d+\)/,
    );
    return true;
  });
  await writer.close();
});

for (const level of ["auto", "memory"]) {
  test(`a master that dies before its replica has the blocks, under a writer and a member (${level})`, async () => {
    const url = await started("cluster", { replicas: 1 });
    const writer = await begin(url, level, { partitions: 3 });
    const sizes = [CUT, CUT, CUT];
    const epoch = await writer.epoch(0, { sizes });
    const [, ...rosters] = await peer.ask("keys_of", { stream: "torn", url });
    const loader = load("torn", { group: "g", batchSize: 10, url, notify: () => {} });
    closing.push(() => loader.close());
    const found = new Set();
    const read = async () => {
      for await (const { tensors } of loader) for (const x of tensors.x.data) found.add(Number(x));
    };
    const reading = read();
    reading.catch(() => {}); // the error is raised where it is awaited
    const shard = await epoch.shard(1);
    await write(shard, 0, FIRST);
    await shard.commitAll();
    await peer.ask("cut_off", { key: rosters[1] });
    await write(shard, FIRST, CUT - 20);
    await shard.flush();
    await peer.ask("fail_over");
    await peer.ask("add_replica", { key: rosters[1] });
    if (level === "memory") {
      const rest = async () => {
        await write(shard, CUT - 20, CUT);
        await shard.close();
      };
      await assert.rejects(rest(), (error) => error instanceof ShardMismatch && /offsets 100-/.test(error.message));
      await writer.close();
      return;
    }
    await write(shard, CUT - 20, CUT);
    await shard.close();
    for (const number of [0, 2]) {
      const other = await epoch.shard(number);
      await write(other, 0, CUT);
      await other.close();
    }
    await epoch.close();
    await writer.close();
    await reading;
    assert.deepEqual(
      [...found].sort((a, b) => a - b),
      range(CUT),
    );
    const report = await peer.ask("audit_report", { stream: "torn", url });
    assert.deepEqual([report.findings, report.produced, report.lost], [[], 3 * CUT, 0]);
  });
}

test("a writer opens an epoch again that its partition lost, and goes on", async () => {
  const url = await started("cluster", { replicas: 1 });
  const writer = await begin(url, "memory", { partitions: 3 });
  const [, ...rosters] = await peer.ask("keys_of", { stream: "torn", url });
  await peer.ask("cut_off", { key: rosters[1] });
  const epoch = await writer.epoch(0, { sizes: [0, CUT, 0] });
  await peer.ask("fail_over");
  for (const [number, size] of [0, CUT, 0].entries()) {
    const shard = await epoch.shard(number);
    await write(shard, 0, size);
    await shard.close();
  }
  await epoch.close();
  await writer.close();
  await requireAll(url, CUT);
});

for (const [order, options] of Object.entries({ shared: {}, canonical: { rank: 0, worldSize: 1 } })) {
  test(`a ${order} group is joined once every roster is on a replica`, async () => {
    const url = await started("cluster", { replicas: 1 });
    const writer = await begin(url, "replicas=1", { partitions: 3 });
    const epoch = await writer.epoch();
    await write(epoch, 0, ALL);
    await epoch.close();
    await writer.close();
    const [, ...rosters] = await peer.ask("keys_of", { stream: "torn", url });
    await peer.ask("cut_off", { key: rosters[1] });
    const said = [];
    const loader = load("torn", { group: "g", batchSize: 10, url, ...options, notify: (line) => said.push(line) });
    closing.push(() => loader.close());
    let isOpen = false;
    const opened = loader.open().then(() => {
      isOpen = true;
    });
    opened.catch(() => {}); // the error is raised where it is awaited
    await untilSaid(said, "'replicas=1': 0 of 1 replicas have it");
    assert.equal(isOpen, false);
    await peer.ask("fail_over");
    await peer.ask("add_replica", { key: rosters[1] });
    await opened;
    const known = await peer.ask("ask", { url, command: ["HEXISTS", rosters[1], "g:g"] });
    assert.ok(known);
    const found = [];
    for await (const { tensors } of loader) found.push(...[...tensors.x.data].map(Number));
    assert.deepEqual(
      found.sort((a, b) => a - b),
      range(ALL),
    );
  });
}

test("a loader that waits for a replica can be closed", async () => {
  const url = await started("cluster", { replicas: 1 });
  const writer = await begin(url, "replicas=1");
  await (await writer.epoch()).close();
  await writer.close();
  const [, roster] = await peer.ask("keys_of", { stream: "torn", url });
  await peer.ask("cut_off", { key: roster });
  const said = [];
  const loader = load("torn", { group: "g", batchSize: 10, url, notify: (line) => said.push(line) });
  const opened = loader.open();
  opened.catch(() => {}); // the error is raised where it is awaited
  await untilSaid(said, "0 of 1 replicas have it");
  await loader.close();
  await assert.rejects(opened, /closed/);
});
