// What Node writes is what Python's writer would have written: the same samples, once each, whatever happens meanwhile.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { createClient } from "@redis/client";
import {
  BudgetRefused,
  DamagedKey,
  EpochAbandoned,
  openWriter,
  PenstockError,
  replay,
  ServerUnavailable,
  ShardMismatch,
  SpecMismatch,
  StreamConflict,
  TooLarge,
} from "../dist/index.js";
import { Server } from "../dist/server/client.js";
import { loadStream } from "../dist/stream/stream.js";
import { beginNextEpoch, openEpoch } from "../dist/write/epochs.js";
import { startPeer, told } from "./peer.mjs";
import { EVERY, sampleOf, toldSamples } from "./samples.mjs";

let peer;
let client;
const open = [];

before(async () => {
  peer = await startPeer();
  client = createClient({ url: peer.url });
  await client.connect();
});

after(async () => {
  client.destroy();
  await peer.close();
});

afterEach(async () => {
  for (const one of open.splice(0)) await one.close();
});

/** A writer that is closed after the test. Its notices are kept. */
async function begin(stream, options = {}) {
  const said = [];
  const writer = await openWriter(stream, { url: peer.url, notify: (line) => said.push(line), ...options });
  open.push(writer);
  return Object.assign(writer, { said });
}

async function readByNode(stream, batchSize = 7, epoch = 0) {
  const source = replay(stream, { epoch, batchSize, url: peer.url });
  const found = [];
  for await (const batch of source) found.push(told(batch));
  await source.close();
  return found;
}

async function readByPython(stream, batchSize = 7, epoch = 0) {
  const [found] = await peer.ask("replay", { stream, epoch, batch_size: batchSize });
  return found;
}

/** What readers tell of numbered samples in planned shards. */
function expected(spec, sizes, { batchSize = 7, holes = [], epoch = 0 } = {}) {
  const every = sizes.flatMap((size, shard) =>
    Array.from({ length: size }, (_, offset) => [[epoch, shard, offset], sampleOf(spec, 1000 * shard + offset)]),
  );
  const good = every.filter(([[, , offset]]) => !holes.includes(offset));
  const batches = [];
  for (let at = 0; at < good.length; at += batchSize) batches.push(toldSamples(spec, good.slice(at, at + batchSize)));
  return batches;
}

async function writeShards(writer, spec, sizes, holes = []) {
  const epoch = await writer.epoch(0, { sizes });
  for (const [number, size] of sizes.entries()) {
    const shard = await epoch.shard(number);
    for (let offset = shard.position; offset < size; offset += 1) {
      if (holes.includes(offset)) await shard.quarantine("made bad on purpose");
      else await shard.write(sampleOf(spec, 1000 * number + offset));
    }
    await shard.close();
  }
}

async function isClean(stream) {
  const { clean, findings, ...counts } = await peer.ask("audit_report", { stream, url: peer.url });
  assert.deepEqual(findings, []);
  assert.ok(clean);
  return counts;
}

const SIZES = [40, 0, 33];
const HOLES = [0, 5, 6, 32];

for (const [partitions, blockBytes] of [
  [1, 1_000_000],
  [3, 500],
]) {
  test(`every dtype arrives bit for bit, in ${partitions} partitions and blocks of ${blockBytes}`, async () => {
    const stream = `every-${partitions}`;
    const writer = await begin(stream, { spec: EVERY, partitions, blockBytes });
    await writeShards(writer, EVERY, SIZES, HOLES);
    const wanted = expected(EVERY, SIZES, { holes: HOLES });
    assert.deepEqual(await readByPython(stream), wanted);
    assert.deepEqual(await readByNode(stream), wanted);
    const counts = await isClean(stream);
    assert.deepEqual(counts, { produced: 65, bad: 8, lost: 0, duplicate: 0 });
    assert.deepEqual(writer.said, []);
  });
}

test("Node to Node to Python to Node changes no bit", async () => {
  const sizes = [30, 20];
  await writeShards(await begin("hop-0", { spec: EVERY, blockBytes: 700 }), EVERY, sizes);
  const second = await begin("hop-1", { spec: EVERY, blockBytes: 300 });
  const epoch = await second.epoch(0, { sizes });
  const shards = [await epoch.shard(0), await epoch.shard(1)];
  const source = replay("hop-0", { epoch: 0, batchSize: 5, url: peer.url });
  for await (const batch of source) {
    const [{ shard }, ...others] = batch.spans;
    assert.deepEqual(others, []);
    if (shard === 0) await shards[0].writeBatch(batch.tensors);
    else {
      for (let row = 0; row < batch.size; row += 1) {
        const sample = Object.entries(batch.tensors).map(([name, column]) => [name, column.sample(row)]);
        await shards[1].write(Object.fromEntries(sample));
      }
    }
  }
  await source.close();
  for (const shard of shards) await shard.close();
  await peer.ask("copy", { source: "hop-1", stream: "hop-2", url: peer.url });
  const wanted = expected(EVERY, sizes);
  for (const stream of ["hop-0", "hop-1", "hop-2"]) assert.deepEqual(await readByNode(stream), wanted, stream);
});

test("an epoch refuses an option that it does not have", async () => {
  const writer = await begin("misspelt");
  await assert.rejects(writer.epoch(0, { size: [3] }), /^BadOption: epoch has no option 'size' \(did you mean 'sizes'/);
});

test("a stream has the settings and the epoch the plan that Python reads", async () => {
  const options = { partitions: 5, budgetBytes: 10 ** 8, blockBytes: 12_345, retention: "bytes:1.5kb" };
  const writer = await begin("made", { ...options, spec: EVERY, info: { classes: ["cat", "ü"] } });
  const epoch = await writer.epoch(2, { sizes: [3], seed: 7, fingerprint: "f" });
  const facts = await peer.ask("facts", { stream: "made", url: peer.url });
  const spec = Object.entries(EVERY).map(([name, [dtype, shape]]) => [name, [dtype, shape]]);
  assert.deepEqual(Object.entries(JSON.parse(facts.spec)), spec);
  assert.deepEqual(facts.settings, [10 ** 8, 12_345, "bytes:1536", "auto", "inline"]);
  assert.deepEqual(facts.info, { classes: ["cat", "ü"] });
  assert.deepEqual(facts.epochs, [[2, "sized", "epoch", 7, "f", [3]]]);
  assert.equal(epoch.number, 2);
  const again = await begin("made", { retention: "epochs:3", info: { unit: "m" } });
  const found = await peer.ask("facts", { stream: "made", url: peer.url });
  assert.deepEqual(found.info, { classes: ["cat", "ü"], unit: "m" });
  assert.equal(found.settings[2], "epochs:3");
  assert.deepEqual(again.spec, writer.spec);
  await assert.rejects(again.epoch(2, { seed: 8, fingerprint: "f" }), /its seed is 7, not 8/);
  await assert.rejects(again.epoch(2, { sizes: [4] }), StreamConflict);
  await assert.rejects(begin("made", { partitions: 4 }), StreamConflict);
  await assert.rejects(
    begin("made", { spec: { x: ["uint8", []] } }),
    /holds samples of another spec.* a stream of another name.* it takes spec: \{"/,
  );
});

test("a stream is in the directory, with those of versions that have none, and the next start scans nothing", async () => {
  const names = "penstock:{~streams}:names";
  const scans = async () => Number(/cmdstat_scan:calls=(\d+)/.exec(await client.info("commandstats"))?.[1] ?? 0);
  await begin("js-older", { spec: { x: ["uint8", [2]] } });
  await client.del(names);
  await begin("js-entered", { spec: { x: ["uint8", [2]] } });
  const found = await client.hGetAll(names);
  for (const name of ["js-older", "js-entered"]) {
    assert.equal(found[name], await client.hGet(`penstock:{${name}}:meta`, "id"));
  }
  const before = await scans();
  await begin("js-third", { spec: { x: ["uint8", [2]] } });
  await assert.rejects(readByNode("js-thrid"), /did you mean 'js-third'/);
  assert.equal(await scans(), before);
  assert.ok(Object.hasOwn(await client.hGetAll(names), "js-third"));
});

test("an error says how many streams it leaves out", async () => {
  for (let number = 0; number < 11; number += 1) await begin(`many-${number}`, { spec: { x: ["uint8", [2]] } });
  await assert.rejects(readByNode("elsewhere"), /streams there: (\S+, ){9}\S+ and \d+ more; /);
});

test("partitions have the tags that Python gives them", async () => {
  for (const partitions of [1, 2, 7]) {
    const stream = `tags-${partitions}`;
    await begin(stream, { partitions });
    const { tags } = await peer.ask("facts", { stream, url: peer.url });
    const wanted = await peer.ask("tags", { stream, stream_id: tags[0].split(".")[0], count: partitions });
    assert.deepEqual(tags, wanted);
  }
});

test("the first sample tells the spec as in Python", async () => {
  const samples = [
    { x: { data: new Float32Array(6), shape: [2, 3] }, y: 3 },
    { x: 0.5, y: true, z: [[1, 2], [3, 4]] },
    { x: [1, 2.5], y: [true, false], z: "abc", n: new Uint8Array(4) },
    { x: { a: new BigInt64Array(2), b: { c: 1 } }, y: { data: new Float64Array(0), shape: [0, 4] } },
    { x: { data: new Int16Array(16), shape: [8, 2] }, y: new Int32Array(8) },
  ]; // biome-ignore format: one sample a line
  const wanted = await peer.ask("infer");
  for (const [number, sample] of samples.entries()) {
    const writer = await begin(`inferred-${number}`);
    const epoch = await writer.epoch();
    await epoch.write(sample);
    await epoch.close();
    const { spec } = await peer.ask("facts", { stream: `inferred-${number}`, url: peer.url });
    assert.equal(spec, wanted[number]);
    assert.match(writer.said[0], /^the spec of 'inferred-\d' is taken from its first sample: x/);
    assert.equal(writer.said[0].includes("its 8 rows are 8 samples"), number === 4);
  }
});

test("numbers become what the spec says, and no value changes in silence", async () => {
  const spec = { i: ["int8", [2]], l: ["int64", []], f: ["float32", []], h: ["float16", []], b: ["bfloat16", []] };
  const writer = await begin("numbers", { spec: { ...spec, t: ["bool", []], c: ["complex64", []] } });
  const epoch = await writer.epoch();
  const good = { i: [1, -128], l: 2n ** 60n, f: 0.1, h: 1 / 3, b: 1e38, t: true, c: 2 };
  await epoch.write(good);
  await epoch.write({ ...good, l: 5, f: 3n, h: -65_504, b: Number.NaN, t: false, c: 0.5 });
  for (const [name, value, text] of [
    ["i", [1, 128], "found 128, expected a value int8 can hold"],
    ["i", [1, 0.5], "found dtype float64, expected dtype int8"],
    ["i", [1, 2, 3], "found shape (3,), expected shape (2,); a size that differs is null in the spec"],
    ["i", new Float32Array(2), "found dtype float32, expected dtype int8; convert it (`Int8Array.from(data)`)"],
    ["i", new Int8Array(4), "found 4 elements, expected shape (2,); writeBatch() writes a batch, one sample a row"],
    ["l", 2n ** 63n, "found 9223372036854775808, expected a value int64 can hold"],
    ["f", 1e39, "found 1e+39, expected a value float32 can hold"],
    ["f", 2n ** 24n + 1n, "found 16777217, expected a value float32 can hold"],
    ["h", 65_520, "found 65520, expected a value float16 can hold"],
    ["t", 1, "found dtype int64, expected dtype bool"],
    ["f", "0.5", "found a string, expected float32 of shape ()"],
    ["f", undefined, "found nothing, expected float32 of shape ()"],
  ]) {
    const check = (error) => error instanceof SpecMismatch && error.message.startsWith(`tensor '${name}': ${text}`);
    await assert.rejects(epoch.write({ ...good, [name]: value }), check);
  }
  await assert.rejects(
    epoch.write({ i: [1, 2] }),
    /tensor 'l': found nothing, expected a tensor, the spec being i: int8/,
  );
  await assert.rejects(epoch.write({ ...good, z: 1 }), /tensor 'z': found a tensor, expected none of that name/);
  await epoch.close();
  const [[, rows]] = await readByPython("numbers");
  assert.deepEqual(await peer.ask("numbers"), rows);
});

test("rows of a batch are checked before anything is written", async () => {
  const spec = { x: ["float32", [2]], name: ["bytes", []] };
  const writer = await begin("rows", { spec });
  const epoch = await writer.epoch();
  for (const [rows, text] of [
    [{ x: new Float32Array(4), name: ["a"] }, "tensor 'name': found 1 rows, expected 2 rows as in 'x'"],
    [{ x: new Float32Array(5), name: ["a"] }, "tensor 'x': found 5 elements, expected n rows of float32 [n, 2]"],
    [{ x: 3, name: ["a"] }, "tensor 'x': found a number, expected n rows of float32 [n, 2]"],
    [{ x: new Float32Array(4), name: ["a", 5] }, "tensor 'name': found a number, expected bytes"],
    [{ x: new Float32Array(4), name: Buffer.from("ab") }, "tensor 'name': found a Buffer, expected an array of one"],
  ]) {
    await assert.rejects(epoch.writeBatch(rows), ({ message }) => message.startsWith(text));
  }
  await epoch.writeBatch({ x: new Float32Array([1, 2, 3, 4]), name: ["a", Buffer.from([0, 255])] });
  await epoch.writeBatch({ x: [[5, 6]], name: [""] });
  await epoch.close();
  const { produced } = await isClean("rows");
  assert.equal(produced, 3);
});

test("an epoch without a plan spreads over partitions, and is sized when it is closed", async () => {
  const spec = { x: ["int32", []] };
  const writer = await begin("spread", { spec, partitions: 2 });
  const epoch = await writer.epoch();
  for (let at = 0; at < 5000; at += 1) await epoch.write({ x: at });
  await epoch.writeBatch({ x: Int32Array.from({ length: 9000 }, (_, at) => 5000 + at) });
  await epoch.close();
  const { epochs } = await peer.ask("facts", { stream: "spread", url: peer.url });
  assert.deepEqual(epochs[0].slice(0, 3), [0, "produced", "epoch"]);
  assert.deepEqual(epochs[0][5], [4096, 4096, 4096, 1712]);
  const source = replay("spread", { epoch: 0, batchSize: 14_000, url: peer.url });
  for await (const { tensors } of source) assert.deepEqual([...tensors.x.data], [...Array(14_000).keys()]);
  await source.close();
  await assert.rejects(epoch.write({ x: 1 }), /epoch 0 is closed/);
});

test("an abandoned epoch takes no more samples", async () => {
  const spec = { x: ["int32", []] };
  const writer = await begin("abandoned", { spec });
  const epoch = await writer.epoch();
  const other = await (await begin("abandoned")).epoch(0);
  const shard = await other.shard(1);
  await shard.write({ x: 1 });
  await epoch.write({ x: 1 });
  await epoch.abandon();
  await assert.rejects(shard.commitAll(), EpochAbandoned);
  await assert.rejects(writer.epoch(0), EpochAbandoned);
  const { epochs } = await peer.ask("facts", { stream: "abandoned", url: peer.url });
  assert.equal(epochs[0][1], "abandoned");
  await isClean("abandoned");
});

test("a writer whose epoch an operator closes says what is not part of it", async () => {
  const said =
    /shard 0 ended with 2 samples of epoch 0 of 'closed', because .*`penstock epochs close` closed it before.*the next one/;
  const writer = await begin("closed", { spec: { x: ["int32", []] } });
  for (const x of [1, 2]) await writer.write({ x });
  await writer.flush();
  await peer.ask("close_feed", { stream: "closed", epoch: 0, url: peer.url });
  await writer.write({ x: 3 });
  await assert.rejects(writer.close(), (error) => error instanceof ShardMismatch && said.test(error.message));
});

test("a planned shard takes what is planned, and no call before the last one ended", async () => {
  const writer = await begin("planned", { spec: { x: ["int32", []] } });
  const epoch = await writer.epoch(0, { sizes: [2] });
  const shard = await epoch.shard(0);
  await shard.write({ x: 1 });
  await assert.rejects(shard.close(), /was closed after 1 samples, its manifest plans 2/);
  await shard.write({ x: 2 });
  await assert.rejects(shard.write({ x: 3 }), /shard 0 is full: 2 samples are planned/);
  const committing = shard.commitAll();
  await assert.rejects(shard.write({ x: 3 }), /await each of them/);
  await committing;
  await shard.close();
  await assert.rejects(epoch.shard(1), /is planned in 1 shards, found 1/);
  await assert.rejects(epoch.write({ x: 1 }), /write with .shard\(n\)/);
});

test("a sample that no reserve could hold, and a budget that no server could, are refused", async () => {
  const writer = await begin("small", { spec: { x: ["uint8", [3000]] }, budgetBytes: 10_000 });
  const epoch = await writer.epoch();
  await assert.rejects(
    epoch.write({ x: new Uint8Array(3000) }),
    (error) =>
      error instanceof TooLarge && /a quarter of the budget.* raise budgetBytes to 12000, or/.test(error.message),
  );
  await epoch.abandon();
  await client.configSet("maxmemory", "100mb");
  try {
    await assert.rejects(begin("vast", { budgetBytes: 10 ** 9 }), BudgetRefused);
  } finally {
    await client.configSet("maxmemory", "0");
  }
});

test("only the sample that is too large is refused", async () => {
  const spec = { x: ["uint8", [null]], y: ["float64", []] };
  const writer = await begin("poison", { spec, budgetBytes: 20_000, blockBytes: 4000, partitions: 1 });
  const epoch = await writer.epoch();
  const bytes = new Map([
    [5, 8000], // a block may have 5000 bytes
    [7, 4900], // it fits alone, and not with number 6
  ]);
  const refused = [];
  for (let y = 0; y < 12; y++) {
    await epoch.write({ x: new Uint8Array(bytes.get(y) ?? 100), y }).catch((error) => {
      assert.ok(error instanceof TooLarge, error);
      refused.push(y);
    });
  }
  await epoch.close();
  assert.deepEqual(refused, [5]);
  const source = replay("poison", { url: peer.url, epoch: 0, batchSize: 4 });
  const found = [];
  for await (const batch of source) found.push(...batch.tensors.y.data);
  await source.close();
  assert.deepEqual(found, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]);
});

test("a changed budget is told once", async () => {
  const told = [];
  for (const budgetBytes of [5_000_000, undefined, 2 ** 20, 2 ** 20]) {
    told.push(...(await begin("bud", { budgetBytes })).said);
  }
  assert.deepEqual(told, ["the budget of stream 'bud' is 1.0 MiB from now on; it was 4.8 MiB"]);
});

test("payloads in segments are refused in one sentence", async () => {
  const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));
  await peer.ask("produce", {
    stream: "files",
    spec: "fixed",
    sizes: [3],
    payload: `segments:${folder}`,
  });
  await assert.rejects(begin("files"), /keeps its payloads in segments:.*which Node does not write/);
  await peer.ask("remove", { stream: "files", url: peer.url });
  rmSync(folder, { recursive: true, force: true });
});

test("a server that is not there is said at once", async () => {
  await assert.rejects(begin("nowhere", { url: "redis://localhost:1" }), ServerUnavailable);
});

// --- exactly once ---

const PRODUCER = fileURLToPath(new URL("producer.mjs", import.meta.url));

/** Run a producer, and kill it after `most` lines. Return whether it ended before the kill. */
function runProducer(options, most) {
  const child = spawn(process.execPath, [PRODUCER, JSON.stringify({ url: peer.url, ...options })], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  let [text, lines] = ["", 0];
  child.stdout.on("data", (data) => {
    text += data;
    lines += String(data).split("\n").length - 1;
    if (lines >= most) child.kill("SIGKILL");
  });
  return new Promise((resolve) => child.once("close", () => resolve(text.endsWith("done\n"))));
}

test("a producer that is killed again and again loses nothing and writes nothing twice", async () => {
  const spec = { x: ["float32", [8]], y: ["int64", []], name: ["bytes", []] };
  const options = { stream: "killed", spec, sizes: [150, 120], holes: [10, 11, 70] };
  let kills = 0;
  for (let most = 1; !(await runProducer(options, most)); most += 5) kills += 1;
  assert.ok(kills >= 5, `${kills} kills`);
  assert.deepEqual(await readByPython("killed"), expected(spec, options.sizes, { holes: options.holes }));
  assert.deepEqual(await isClean("killed"), { produced: 264, bad: 6, lost: 0, duplicate: 0 });
});

test("a connection that is cut again and again loses nothing and writes nothing twice", async () => {
  const spec = { x: ["float32", [64]], name: ["bytes", []] };
  const writer = await begin("cut", { spec, blockBytes: 2000 });
  let cuts = 0;
  let isOver = false;
  const committed = async () => {
    const [entries] = await client.keys("penstock:{cut.*}:0:entries");
    return entries === undefined ? 0 : await client.xLen(entries);
  };
  const cutting = (async () => {
    for (let seen = 0; !isOver; ) {
      const now = await committed(); // a cut may follow each commit, or a machine under load would never commit
      await new Promise((resolve) => setTimeout(resolve, cuts % 7));
      if (now === seen) continue;
      seen = now;
      cuts += Number(await client.sendCommand(["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]));
    }
  })();
  const sizes = [2000, 1500];
  try {
    await writeShards(writer, spec, sizes);
  } finally {
    isOver = true;
    await cutting;
  }
  assert.ok(cuts >= 10, `${cuts} cuts`);
  assert.deepEqual(await readByPython("cut", 500), expected(spec, sizes, { batchSize: 500 }));
  assert.deepEqual(await isClean("cut"), { produced: 3500, bad: 0, lost: 0, duplicate: 0 });
  assert.match(writer.said[0], /^the connection broke while/);
});

test("a client of the caller is taken as it is, also while it is cut", async () => {
  for (const RESP of [2, 3]) {
    const own = createClient({ url: peer.url, RESP });
    own.on("error", () => {});
    await own.connect();
    const stream = `own-${RESP}`;
    const spec = { x: ["float32", [64]] };
    const writer = await begin(stream, { url: undefined, client: own, spec, blockBytes: 2000 });
    const id = await own.sendCommand(["CLIENT", "ID"]);
    const sizes = [400];
    const written = writeShards(writer, spec, sizes);
    await client.sendCommand(["CLIENT", "KILL", "ID", String(id)]);
    await written;
    await writer.close();
    assert.equal(await own.ping(), "PONG"); // the caller closes it
    own.destroy();
    assert.deepEqual(await readByPython(stream, 100), expected(spec, sizes, { batchSize: 100 }));
    await isClean(stream);
  }
});

test("two writers of one shard append each sample once", async () => {
  const spec = { x: ["float32", [16]] };
  const sizes = [700];
  const writers = [await begin("both", { spec, blockBytes: 1500 }), await begin("both")];
  await Promise.all(writers.map((writer) => writeShards(writer, spec, sizes)));
  assert.deepEqual(await readByPython("both", 100), expected(spec, sizes, { batchSize: 100 }));
  assert.deepEqual(await isClean("both"), { produced: 700, bad: 0, lost: 0, duplicate: 0 });
});

test("of two programs that write one unplanned epoch the second is refused by name", async () => {
  const spec = { x: ["int32", []] };
  const first = await (await begin("rivals", { spec })).epoch(0);
  const second = await (await begin("rivals")).epoch(0);
  await first.write({ x: 1 });
  await second.write({ x: 2 });
  await first.flush();
  await assert.rejects(
    second.close(),
    (error) => error instanceof ShardMismatch && /were left out/.test(error.message),
  );
});

test("a record that somebody forged does not make a shard complete", async () => {
  const writer = await begin("forged", { spec: { x: ["int32", []] } });
  const epoch = await writer.epoch(0, { sizes: [4] });
  const shard = await epoch.shard(0);
  await shard.write({ x: 0 });
  await shard.commitAll();
  const [key] = await client.keys("penstock:{forged.*}:0:0:index");
  await client.sendCommand(["XADD", key, "3-0", "e", "1-1", "f", "1", "n", "2", "b", "8", "h", "[]"]);
  for (let at = 1; at < 4; at += 1) await shard.write({ x: at });
  await assert.rejects(
    shard.close(),
    (error) => error instanceof ShardMismatch && /3-0 names an entry/.test(error.message),
  );
  const { epochs } = await peer.ask("facts", { stream: "forged", url: peer.url });
  assert.equal(epochs[0][1], "sized");
});

test("samples that a program leaves behind are counted when it ends", async () => {
  const code = `
    import { openWriter } from "${new URL("../dist/index.js", import.meta.url)}";
    const writer = await openWriter("left", { url: "${peer.url}" });
    const epoch = await writer.epoch();
    for (let at = 0; at < 3; at += 1) await epoch.write({ x: at });
    process.exit();
  `;
  const child = spawn(process.execPath, ["--input-type=module", "--eval", code], {
    stdio: ["ignore", "ignore", "pipe"],
  });
  let text = "";
  child.stderr.on("data", (data) => {
    text += data;
  });
  await new Promise((resolve) => child.once("close", resolve));
  assert.match(text, /3 samples of 'left' may be lost, because nothing closed the epoch/);
});

test("a writer that is closed before its epoch commits what that was given", async () => {
  const writer = await begin("early", { spec: { x: ["float64", []] } });
  const epoch = await writer.epoch();
  for (let x = 0; x < 5; x++) await epoch.write({ x });
  await writer.close();
  assert.match(
    writer.said.join(),
    /^epoch 0 of 'early' stays open, and trainers wait .*`penstock epochs close early 0`/,
  );
  const again = await begin("early");
  assert.equal((await (await again.epoch(0)).shard(0)).position, 5);
});

test("a flush of the writer commits what its open epoch was given", async () => {
  const writer = await begin("flushed", { spec: { x: ["float64", []] } });
  const epoch = await writer.epoch();
  await epoch.write({ x: 1 });
  await writer.flush();
  assert.equal((await (await (await begin("flushed")).epoch(0)).shard(0)).position, 1);
  await epoch.close();
});

test("writers of a feed that start together share an epoch", async () => {
  for (const name of ["together1", "together2", "together3"]) {
    const writers = await Promise.all(Array.from({ length: 6 }, () => begin(name, { spec: { x: ["float64", []] } })));
    await Promise.all(writers.map((writer, number) => writer.write({ x: number })));
    const { epochs } = await peer.ask("facts", { stream: name, url: peer.url });
    assert.deepEqual(
      epochs.map(([number, state]) => [number, state]),
      [[0, "open"]],
    );
  }
});

test("a feed leaves alone an epoch that another producer took after a server came back older", async () => {
  await (await begin("older", { spec: { x: ["float64", []] } })).close();
  const server = await Server.open({ url: peer.url });
  const stream = await loadStream(server, "older");
  const begun = await beginNextEpoch(server, stream, 0, "feed");
  await client.hSet("penstock:{older}:0:manifest", { id: "another", kind: "epoch" });
  await assert.rejects(openEpoch(server, stream, 0, { kind: "feed" }, begun), /was given out twice/);
  await server.close();
});

test("a damaged counter of epochs ends a feed with the name of its key", async () => {
  const writer = await begin("counter", { spec: { x: ["float64", []] } });
  await client.hSet("penstock:{counter}:meta", "next_epoch", "abc");
  await assert.rejects(writer.write({ x: 1 }), (error) => error instanceof DamagedKey);
});

test("a slow writer of a feed sees after a moment that its epoch is sealed", async () => {
  const writer = await begin("slow", { spec: { x: ["float64", []] } });
  await writer.write({ x: 1 });
  await writer.flush();
  const states = async () =>
    (await peer.ask("facts", { stream: "slow", url: peer.url })).epochs.map(([, state]) => state);
  await client.hSet("penstock:{slow}:0:manifest", "sealed", "1");
  await new Promise((resolve) => setTimeout(resolve, 1100));
  await writer.write({ x: 2 });
  assert.deepEqual(await states(), ["produced", "open"]);
});

test("a closed writer says so", async () => {
  const writer = await begin("closed");
  await writer.close();
  await assert.rejects(writer.epoch(), (error) => error instanceof PenstockError && /is closed/.test(error.message));
});
