// Streams that Python compressed with zstd give the samples that Python reads, to the bit.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { load, replay, UnsupportedVersion } from "../dist/index.js";
import { startPeer, told } from "./peer.mjs";

const SIZES = [300, 70];
const PLACES = { inline: "inline", segments: "segments" };

let peer;
const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));

before(async () => {
  peer = await startPeer();
});

after(async () => {
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

async function produce(stream, where, compression, block_bytes = 400_000) {
  const payload = where === PLACES.inline ? "inline" : `segments:${folder}/segments`;
  await peer.ask("produce", { stream, spec: "masks", sizes: SIZES, payload, compression, block_bytes });
  const [packed, all] = await peer.ask("compressed", { stream, url: peer.url });
  assert.ok(packed > 0 && packed === all, `${packed} of ${all}`);
}

async function collect(batches) {
  const found = [];
  for await (const batch of batches) found.push(told(batch));
  await batches.close();
  return found;
}

for (const where of Object.keys(PLACES)) {
  test(`zstd, ${where}: replay, a shared group and a rank`, async () => {
    await produce(where, where, "zstd");
    const options = { url: peer.url, batchSize: 7, notify() {} };
    const [expected] = await peer.ask("replay", { stream: where, epoch: 0, batch_size: 7 });
    assert.deepEqual(await collect(replay(where, { url: peer.url, batchSize: 7, epoch: 0 })), expected);
    assert.deepEqual(await collect(load(where, { ...options, group: "rank", rank: 0, worldSize: 1 })), expected);
    const shared = await collect(load(where, { ...options, group: "shared" }));
    const names = (batches) => batches.flatMap(([identities]) => identities.map(String)).sort();
    assert.deepEqual(names(shared), names(expected));
  });

  test(`blosc2, ${where}: the reader stops, and no entry becomes a dead letter`, async () => {
    const stream = `${where}-blosc2`;
    await produce(stream, where, "mask=blosc2");
    const options = { url: peer.url, batchSize: 7, notify() {} };
    const isClear = (error) => error instanceof UnsupportedVersion && /"mask".*"blosc2".*zstd only/.test(error.message);
    await assert.rejects(collect(replay(stream, { url: peer.url, batchSize: 7, epoch: 0 })), isClear);
    await assert.rejects(collect(load(stream, { ...options, group: "g" })), (error) => {
      const words = /^entry \S+ of epoch 0 of '.*', which is kept for group 'g', cannot be read here: tensor "mask" is/;
      assert.match(error.message, words);
      return isClear(error);
    });
    const [, text] = await peer.ask("audit", { stream });
    assert.match(text, / g +0/);
  });
}

test("a program without zstd names what to install", () => {
  // as in a page, or in Node before 22.15
  const script = `
    process.getBuiltinModule = undefined;
    const { decode, parseSpec } = await import("./dist/browser.js");
    const { cases, fieldsOf } = await import("./test/corpus.mjs");
    const found = cases("good").find(({ name }) => name === "zstd-as-written");
    try { decode(fieldsOf(found), parseSpec(found.spec)); } catch (error) { console.log(error.name, error.message); }`;
  const cwd = new URL("..", import.meta.url);
  const said = execFileSync(process.execPath, ["--input-type=module", "--eval", script], { cwd, encoding: "utf8" });
  assert.match(said, /^UnsupportedVersion tensor x is compressed with zstd.*Node 22\.15 or newer.*penstock gateway/);
});
