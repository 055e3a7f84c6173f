// A member of a group trains with fitDataset. A batch counts once a step has used it, however far tf.data has read.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { after, afterEach, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import * as tf from "@tensorflow/tfjs";
import "@tensorflow/tfjs-backend-wasm";
import { createClient } from "@redis/client";
import { BadOption, load, WaitTimeout } from "../dist/index.js";
import { startPeer } from "./peer.mjs";
import { numberModel } from "./tfjsModel.mjs";

const FIELDS = { xs: "x", ys: "y" };
const SAMPLES = Array.from({ length: 80 }, (_, n) => 1000 * Math.floor(n / 40) + (n % 40));

let peer;
let client;

before(async () => {
  await tf.setBackend("wasm");
  peer = await startPeer();
  client = createClient({ url: peer.url });
  await client.connect();
});

after(async () => {
  client.destroy();
  await peer.close();
});

const loaders = [];

/** A loader that is closed after the test. */
function begin(stream, options = {}) {
  const given = { group: "node", batchSize: 8, acknowledge: "manual", url: peer.url, notify: () => {}, ...options };
  const loader = load(stream, given);
  loaders.push(loader);
  return loader;
}

afterEach(async () => {
  for (const loader of loaders.splice(0)) await loader.close();
});

/** Entries of about four samples, which no batch size divides. */
const write = (stream, epochs = 1) =>
  peer.ask("produce", { stream, spec: "numbers", sizes: [40, 40], block_bytes: 150, epochs });

/** Return the entries of an epoch that the group has not acknowledged. */
async function pending(stream, epoch = 0) {
  const [key] = await client.keys(`penstock:{${stream}.*}:${epoch}:entries`);
  const { pending: count } = await client.xPending(key, "node");
  return count;
}

/** Train, and return the labels of each step. */
async function train(data, { chain = (same) => same, epochs = 1, stopAfter = Number.POSITIVE_INFINITY } = {}) {
  const read = [];
  const trained = [];
  const model = numberModel(tf);
  const noting = data.map((element) => {
    read.push(Array.from(element.ys.dataSync()));
    return element;
  });
  const stop = {
    onBatchEnd: () => {
      trained.push(read[trained.length]);
      if (trained.length === stopAfter) model.stopTraining = true;
    },
  };
  await model.fitDataset(chain(noting), { epochs, verbose: 0, callbacks: [data.callback, stop] });
  return { read, trained };
}

const ascending = (numbers) => numbers.flat(2).sort((a, b) => a - b);

async function isClean(stream) {
  const [code, said] = await peer.ask("audit", { stream });
  assert.equal(code, 0, said);
}

test("each epoch of fitDataset is the group's next one, and all its samples are acknowledged", async () => {
  await write("epochs", 2);
  const data = begin("epochs").dataset(tf, FIELDS);
  const { trained } = await train(data, { chain: (same) => same.prefetch(3), epochs: 2 });
  assert.deepEqual(ascending(trained), ascending([SAMPLES, SAMPLES.map((n) => 100_000 + n)]));
  assert.deepEqual([await pending("epochs", 0), await pending("epochs", 1)], [0, 0]);
  const [roster] = await client.keys("penstock:{epochs.*}:roster");
  assert.deepEqual([await client.hGet(roster, "d:node:0"), await client.hGet(roster, "d:node:1")], ["1", "1"]);
  await data.close();
  await isClean("epochs");
});

test("a training that stops hands back what its steps have not used, also what prefetch has read", async () => {
  await write("stopped");
  const first = begin("stopped").dataset(tf, FIELDS);
  const { read, trained } = await train(first, { chain: (same) => same.prefetch(4), stopAfter: 3 });
  assert.equal(trained.length, 3);
  assert.ok(read.length > 3); // read ahead, and not acknowledged
  assert.ok((await pending("stopped")) > 0);
  await first.close();
  const second = begin("stopped").dataset(tf, FIELDS);
  const rest = await train(second);
  assert.deepEqual(ascending([trained, rest.trained]), SAMPLES);
  await second.close();
  await isClean("stopped");
});

test("rows that another batch of the dataset still needs keep their batch unacknowledged", async () => {
  await write("window");
  const options = { ...FIELDS, batchSize: 5, shuffle: { window: 30, seed: 1 } };
  const first = begin("window").dataset(tf, options);
  const { trained } = await train(first, { chain: (same) => same.prefetch(2), stopAfter: 8 });
  await first.close();
  const second = begin("window").dataset(tf, FIELDS);
  const rest = await train(second);
  const both = ascending([trained, rest.trained]);
  assert.deepEqual([...new Set(both)], SAMPLES); // nothing is lost
  assert.ok(both.length < SAMPLES.length + 40); // and what comes again was in the window
  await second.close();
});

test("a training killed with SIGKILL loses nothing, and repeats nothing that its steps had used", async () => {
  await write("killed");
  const options = {
    stream: "killed",
    group: "node",
    batchSize: 8,
    url: peer.url,
    leaseMs: 1000,
    member: "first",
    steps: 3,
  };
  const script = fileURLToPath(new URL("tfjsMember.mjs", import.meta.url));
  const child = spawn(process.execPath, [script, JSON.stringify(options)], { stdio: ["ignore", "pipe", "inherit"] });
  const [line] = await once(createInterface({ input: child.stdout }), "line");
  child.kill("SIGKILL");
  await once(child, "exit");
  const { acknowledged, read } = JSON.parse(line);
  assert.ok(read > acknowledged.length);
  const data = begin("killed", { leaseMs: 1000 }).dataset(tf, FIELDS);
  const { trained } = await train(data);
  assert.deepEqual(ascending([acknowledged, trained]), SAMPLES);
  await data.close();
  await isClean("killed");
});

test("a loader that acknowledges by itself is refused", async () => {
  const loader = begin("refused", { acknowledge: "next" });
  assert.throws(() => loader.dataset(tf, FIELDS), BadOption);
  assert.throws(() => begin("refused", { acknowledge: undefined }).dataset(tf, FIELDS), /acknowledge: "manual"/);
});

test("an error of the loader reaches fitDataset", async () => {
  await write("short");
  const data = begin("short", { timeoutMs: 300 }).dataset(tf, FIELDS);
  await assert.rejects(train(data, { chain: (same) => same.prefetch(2), epochs: 2 }), WaitTimeout);
  assert.equal(await pending("short"), 0);
});

test("close wakes a training that waits for an epoch", async () => {
  await write("waiting");
  let told;
  const waits = new Promise((resolve) => {
    told = resolve;
  });
  const data = begin("waiting", { notify: told }).dataset(tf, FIELDS);
  const training = train(data, { chain: (same) => same.prefetch(2), epochs: 2 });
  await waits;
  await data.close();
  await training;
});

test("two ranks take equally many steps, and each sample once", async () => {
  await write("ranks");
  const both = [0, 1].map((rank) => begin("ranks", { rank, worldSize: 2 }).dataset(tf, FIELDS));
  const found = await Promise.all(both.map((data) => train(data, { chain: (same) => same.prefetch(2) })));
  for (const { trained } of found) assert.equal(trained.length, 5);
  assert.deepEqual(ascending(found.flatMap(({ trained }) => trained)), SAMPLES);
  for (const data of both) await data.close();
  await isClean("ranks");
});

test("a rank goes on behind its last finished step, not behind what prefetch has read", async () => {
  await write("resumed");
  const place = { rank: 0, worldSize: 1 };
  const first = begin("resumed", place).dataset(tf, FIELDS);
  const { read, trained } = await train(first, { chain: (same) => same.prefetch(4), stopAfter: 3 });
  assert.ok(read.length > 3);
  const state = JSON.parse(JSON.stringify(first.state()));
  assert.deepEqual([state.epoch, state.position], [0, 24]);
  await first.close();
  const second = begin("resumed", { ...place, state }).dataset(tf, FIELDS);
  const rest = await train(second);
  assert.deepEqual([trained, rest.trained].flat(2), SAMPLES); // in order
  await second.close();
  await isClean("resumed");
});
