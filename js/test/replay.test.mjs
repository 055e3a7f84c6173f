// Replay in Node gives the batches of Python's Replay: the same order, the same bytes, and goes on where it stopped.
import assert from "node:assert/strict";
import { chmodSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { createClient } from "@redis/client";
import {
  EpochIncomplete,
  EpochNotFound,
  ReplayTruncated,
  replay,
  SegmentGone,
  SegmentsUnseen,
  ServerUnavailable,
  StateMismatch,
  StreamNotFound,
} from "../dist/index.js";
import { startPeer, told } from "./peer.mjs";

let peer;
const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));

before(async () => {
  peer = await startPeer();
});

after(async () => {
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

const sources = [];

/** A replay that is closed after the test. */
function begin(stream, options) {
  const source = replay(stream, options);
  sources.push(source);
  return source;
}

afterEach(async () => {
  for (const source of sources.splice(0)) await source.close();
});

async function collect(source, most = Number.POSITIVE_INFINITY) {
  const found = [];
  for await (const batch of source) {
    found.push(told(batch));
    if (found.length >= most) break;
  }
  return found;
}

const STREAMS = {
  fixed: { spec: "fixed", sizes: [50, 0, 33], holes: [3, 4, 49] },
  partitioned: { spec: "fixed", sizes: [20, 30, 40, 5], partitions: 3, block_bytes: 200 },
  digits: { spec: "digits", sizes: [40], block_bytes: 100 },
  ragged: { spec: "ragged", sizes: [30, 40], holes: [0], block_bytes: 500 },
  segments: { spec: "ragged", sizes: [30, 40], payload: `segments:${folder}/segments`, block_bytes: 500 },
};

for (const [stream, options] of Object.entries(STREAMS)) {
  test(`${stream}: canonical order, every sample bit for bit`, async () => {
    await peer.ask("produce", { stream, ...options });
    const [expected] = await peer.ask("replay", { stream, epoch: 0, batch_size: 7 });
    const source = begin(stream, { epoch: 0, batchSize: 7, url: peer.url });
    assert.deepEqual(await collect(source), expected);
    const { samples, batches } = await source.open();
    assert.equal(batches, expected.length);
    assert.equal(samples, expected.flatMap(([ids]) => ids).length);
  });

  for (const window of [1, 10, undefined]) {
    test(`${stream}: shuffled in a window of ${window ?? "bytes"} as in Python, pass after pass`, async () => {
      const prefetch = 1000;
      const given = { stream, epoch: 0, batch_size: 7, shuffle: 11, prefetch_bytes: prefetch, passes: 2 };
      const expected = await peer.ask("replay", { ...given, ...(window && { window }) });
      const chosen = { epoch: 0, batchSize: 7, shuffle: 11, prefetchBytes: prefetch, ...(window && { window }) };
      const source = begin(stream, { ...chosen, url: peer.url });
      assert.deepEqual([await collect(source), await collect(source)], expected);
    });

    test(`${stream}: resumed by its state in any place, shuffled in a window of ${window ?? "bytes"}`, async () => {
      const chosen = { epoch: 0, batchSize: 7, shuffle: 3, prefetchBytes: 1000, ...(window && { window }), pass: 2 };
      const whole = begin(stream, { ...chosen, url: peer.url });
      const expected = await collect(whole);
      for (let most = 1; most <= expected.length; most += 2) {
        const begun = begin(stream, { ...chosen, url: peer.url });
        await collect(begun, most);
        const state = JSON.parse(JSON.stringify(begun.state()));
        const resumed = begin(stream, { ...chosen, url: peer.url, state });
        assert.deepEqual(await collect(resumed), expected.slice(most));
      }
    });
  }

  test(`${stream}: resumed by its state in canonical order`, async () => {
    const chosen = { epoch: 0, batchSize: 4, url: peer.url };
    const whole = begin(stream, chosen);
    const expected = await collect(whole);
    for (let most = 1; most <= expected.length; most += 3) {
      const begun = begin(stream, chosen);
      await collect(begun, most);
      const resumed = begin(stream, { ...chosen, state: begun.state() });
      assert.deepEqual(await collect(resumed), expected.slice(most));
      assert.deepEqual(await collect(resumed), expected); // the next pass is whole
    }
  });
}

test("a client is taken as it is, in RESP2 and RESP3", async () => {
  const expected = await peer.ask("replay", { stream: "ragged", epoch: 0, batch_size: 9 });
  for (const RESP of [2, 3]) {
    const client = createClient({ url: peer.url, RESP });
    await client.connect();
    const source = begin("ragged", { epoch: 0, batchSize: 9, client });
    assert.deepEqual(await collect(source), expected[0]);
    await source.close();
    assert.equal(await client.ping(), "PONG"); // the caller closes it
    client.destroy();
  }
});

test("a state of other options is refused", async () => {
  const chosen = { epoch: 0, batchSize: 4, url: peer.url };
  const begun = begin("fixed", chosen);
  await collect(begun, 1);
  const state = begun.state();
  for (const change of [{ batchSize: 5 }, { shuffle: 1 }]) {
    await assert.rejects(replay("fixed", { ...chosen, ...change, state }).open(), StateMismatch);
  }
  await assert.rejects(replay("partitioned", { ...chosen, state }).open(), StateMismatch);
});

test("what is not there has an error of its own", async () => {
  const chosen = { epoch: 0, batchSize: 4, url: peer.url };
  await assert.rejects(replay("nothing", chosen).open(), StreamNotFound);
  await assert.rejects(replay("fixed", { ...chosen, epoch: 7 }).open(), EpochNotFound);
  await assert.rejects(replay("fixed", { ...chosen, url: "redis://localhost:1" }).open(), ServerUnavailable);
  await peer.ask("open_epoch", { stream: "half", url: peer.url });
  await assert.rejects(replay("half", chosen).open(), EpochIncomplete);
});

test("a replay that could not be opened closes without the error that its loop threw", async () => {
  const source = replay("nothing", { epoch: 0, batchSize: 4, url: peer.url });
  await assert.rejects(source[Symbol.asyncIterator]().next(), StreamNotFound);
  await source.close();
  await source.close();
});

test("an entry that was removed ends the replay", async () => {
  await peer.ask("produce", { stream: "torn", ...STREAMS.partitioned });
  const client = createClient({ url: peer.url });
  await client.connect();
  const [key] = await client.keys("penstock:{torn.*}:0:entries");
  const [{ id }] = await client.xRange(key, "-", "+", { COUNT: 1 });
  const source = begin("torn", { epoch: 0, batchSize: 4, url: peer.url });
  await source.open();
  await client.xDel(key, id);
  await assert.rejects(collect(source), (error) => {
    assert.ok(error instanceof ReplayTruncated);
    assert.match(error.message, /was deleted, and not by retention.*`penstock audit torn --repair SOURCE/);
    return true;
  });
  client.destroy();
});

test("a lease keeps the epoch while it is replayed, and is gone afterwards", async () => {
  const client = createClient({ url: peer.url });
  await client.connect();
  const [key] = await client.keys("penstock:{fixed.*}:roster");
  const leases = async () => Object.keys(await client.hGetAll(key)).filter((field) => field.startsWith("r:"));
  const source = replay("fixed", { epoch: 0, batchSize: 4, url: peer.url, leaseMs: 200 });
  await source.open();
  const [lease, ...others] = await leases();
  assert.deepEqual(others, []);
  const till = async () => JSON.parse(await client.hGet(key, lease)).till;
  const first = await till();
  while ((await till()) <= first) await new Promise((resolve) => setTimeout(resolve, 5));
  await client.hDel(key, lease);
  await assert.rejects(async () => {
    for (;;) {
      await collect(source);
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
  }, ReplayTruncated);
  await source.close();
  assert.deepEqual(await leases(), []);
  client.destroy();
});

test("a segment that is damaged, and a folder that others may write to, are refused", async () => {
  const stream = "risky";
  await peer.ask("produce", { stream, ...STREAMS.segments });
  const chosen = { epoch: 0, batchSize: 4, url: peer.url };
  const root = join(folder, "segments");
  const own = readdirSync(root).find((name) => name.startsWith("risky."));
  chmodSync(join(root, own), 0o777);
  await assert.rejects(replay(stream, chosen).open(), SegmentsUnseen);
  chmodSync(join(root, own), 0o700);
  const source = begin(stream, chosen);
  await source.open();
  const file = readdirSync(join(root, own)).find((name) => name.endsWith(".seg") && !name.startsWith("free"));
  writeFileSync(join(root, own, file), "");
  await assert.rejects(collect(source), SegmentGone);
});
