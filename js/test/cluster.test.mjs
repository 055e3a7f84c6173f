// Streams on a real cluster of three masters: what Node writes and reads there, beside Python, and masters that die.
import assert from "node:assert/strict";
import { after, afterEach, before, test } from "node:test";
import { load, openWriter, ReplayTruncated, replay, ServerUnsuitable } from "../dist/index.js";
import { all, killAll, names, startMember } from "./members.mjs";
import { startPeer, told } from "./peer.mjs";
import { sampleOf } from "./samples.mjs";

const SPEC = { x: ["uint8", [1000]], y: ["int64", []] };
const SIZES = [60, 60, 60, 60, 60, 60];
let peer;
let url;
let nodes;

before(async () => {
  peer = await startPeer();
  [url, ...nodes] = await peer.ask("start_cluster");
});

after(async () => {
  await peer.close();
});

const loaders = [];

/** A loader that is closed after the test. */
function begin(stream, options = {}) {
  const loader = load(stream, { group: "g", batchSize: 25, url, notify: () => {}, ...options });
  loaders.push(loader);
  return loader;
}

afterEach(async () => {
  await killAll();
  for (const loader of loaders.splice(0)) await loader.close();
});

/** Write an epoch of several shards, which lie in all partitions. `between` is called in the middle of each. */
async function write(stream, { between = async () => {}, ...options } = {}) {
  const writer = await openWriter(stream, { url, spec: SPEC, blockBytes: 10_000, notify: () => {}, ...options });
  const epoch = await writer.epoch(0, { sizes: SIZES });
  for (const [number, size] of SIZES.entries()) {
    const shard = await epoch.shard(number);
    while (shard.position < size) {
      if (shard.position === 30) await between(number);
      await shard.write(sampleOf(SPEC, 1000 * number + shard.position));
    }
    await shard.close();
  }
  await epoch.close();
  await writer.close();
}

async function collect(loader) {
  const found = [];
  for await (const batch of loader) found.push(told(batch));
  return found;
}

const ids = (batches) => names(batches.map(([identities]) => identities));

async function assertClean(stream, where = url) {
  const report = await peer.ask("audit_report", { stream, url: where });
  assert.deepEqual(report.findings, []);
  assert.equal(report.clean, true);
}

for (const partitions of [1, 3, 8]) {
  test(`${partitions} partitions are written and read in every way, as Python reads them`, async () => {
    const stream = `every-${partitions}`;
    await write(stream, { partitions });
    const [, ...keys] = await peer.ask("keys_of", { stream, url });
    assert.equal(new Set(await peer.ask("masters_of", { keys })).size, Math.min(partitions, 3));
    const [expected] = await peer.ask("replay", { stream, epoch: 0, batch_size: 25, url });
    assert.deepEqual(ids(expected), all(SIZES));
    assert.deepEqual(await collect(replay(stream, { epoch: 0, batchSize: 25, url: nodes[1] })), expected);
    const ranked = await peer.ask("load", { stream, group: "python", batch_size: 25, rank: [0, 1], url });
    const rank = { group: "ranks", rank: 0, worldSize: 1 };
    assert.deepEqual(await collect(begin(stream, rank)), ranked.batches);
    assert.deepEqual(ids(await collect(begin(stream))).sort(), all(SIZES).sort());
    await assertClean(stream);
  });
}

test("members in Node and in Python share an epoch that lies on three masters", async () => {
  const given = { stream: "mixed", group: "g", batch_size: 5, url, pause_s: 0.01 };
  const both = ["node", "python"].map((language) => startMember(language, { ...given, member: language }));
  const joined = () => Promise.all(both.map((member) => member.until(({ isJoined }) => isJoined)));
  await write("mixed", { partitions: 8, between: joined });
  await Promise.all(both.map(({ ended }) => ended));
  for (const { hasLeft, said } of both) assert.ok(hasLeft, said);
  for (const { given } of both) assert.ok(given.length > 0);
  const found = both.flatMap((member) => member.given);
  assert.deepEqual(names(found).sort(), all(SIZES).sort());
  await assertClean("mixed");
});

test("partitions have the tags that Python gives them, and a stream that names no number has 4 for each master", async () => {
  for (const partitions of [undefined, 1, 5]) {
    const stream = `tags-${partitions}`;
    await (await openWriter(stream, { url, spec: SPEC, partitions, notify: () => {} })).close();
    const { tags } = await peer.ask("facts", { stream, url });
    assert.equal(tags.length, partitions ?? 12);
    const [id] = tags[0].split(".");
    assert.deepEqual(tags, await peer.ask("cluster_tags", { stream, stream_id: id, count: tags.length }));
  }
});

test("what no cluster can do is refused with what to write", async () => {
  const several = `${peer.url},localhost:${new URL(peer.url).port}`;
  for (const [where, message] of [
    [`${nodes[0]}/3`, /has database 0 only: leave out the number behind the host/],
    [several, /only a cluster has several hosts: write the one server/],
  ]) {
    await assert.rejects(openWriter("refused", { url: where }), (error) => {
      assert.ok(error instanceof ServerUnsuitable, error.stack);
      assert.match(error.message, message);
      return true;
    });
  }
});

test("a host that is away is passed over", async () => {
  await write("passed", { url: url.replace("@", "@127.0.0.1:1,") });
  await assertClean("passed");
});

test("a writer waits for space on the masters, and a member makes it", async () => {
  const loader = begin("full", { batchSize: 5, prefetchBytes: 10_000 });
  const reading = (async () => {
    const found = [];
    for await (const batch of loader) found.push([...batch.identities()]);
    return found;
  })();
  await write("full", { partitions: 3, budgetBytes: 120_000, between: () => loader.open() });
  assert.deepEqual(names(await reading).sort(), all(SIZES).sort());
  await assert.rejects(collect(replay("full", { epoch: 0, batchSize: 5, url })), ReplayTruncated);
  await assertClean("full");
});
