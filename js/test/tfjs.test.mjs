// Batches as a tf.data.Dataset, with the real TensorFlow.js on its wasm backend.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import * as tf from "@tensorflow/tfjs";
import "@tensorflow/tfjs-backend-wasm";
import { BadOption, dataset, openWriter, replay, TensorRange } from "../dist/index.js";
import { startPeer } from "./peer.mjs";
import { numberModel } from "./tfjsModel.mjs";

const COMPILER = fileURLToPath(new URL("../node_modules/typescript/bin/tsc", import.meta.url));
const TYPES = fileURLToPath(new URL("types", import.meta.url));

let peer;

before(async () => {
  await tf.setBackend("wasm");
  peer = await startPeer();
  await peer.ask("produce", { stream: "fixed", spec: "fixed", sizes: [50, 33], holes: [3] });
  await peer.ask("produce", { stream: "mixed", spec: "digits", sizes: [40] });
  await peer.ask("produce", { stream: "ragged", spec: "ragged", sizes: [30] });
  await peer.ask("produce", { stream: "numbers", spec: "numbers", sizes: [40] });
  await peer.ask("digits");
});

after(() => peer.close());

const sources = [];

/** A replay that is closed after the test. */
function begin(stream, options = {}) {
  const source = replay(stream, { epoch: 0, batchSize: 8, url: peer.url, ...options });
  sources.push(source);
  return source;
}

afterEach(async () => {
  for (const source of sources.splice(0)) await source.close();
});

/** Return an element with arrays in the place of tensors, which are disposed of. */
function plain(value) {
  if (value instanceof tf.Tensor) {
    const found = { shape: value.shape, dtype: value.dtype, values: Array.from(value.dataSync()) };
    value.dispose();
    return found;
  }
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return value;
  if (Array.isArray(value)) return value.map(plain);
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, plain(one)]));
}

async function collect(data) {
  const found = [];
  const iterator = await data.iterator();
  for (let next = await iterator.next(); !next.done; next = await iterator.next()) found.push(plain(next.value));
  return found;
}

/** A source of ten batches of 4, of the numbers 0 to 39 in turn, that notes what happens to it. */
function noted(stream = "numbers", failAt = Number.POSITIVE_INFINITY) {
  const acked = [];
  const seen = { acked, begun: 0, ended: 0, pulled: 0, closed: 0 };
  const source = {
    seen,
    async *[Symbol.asyncIterator]() {
      seen.begun += 1;
      const batches = begin(stream, { batchSize: 4 });
      try {
        for await (const batch of batches) {
          const number = seen.pulled;
          if (number === failAt) throw new Error("the source broke");
          seen.pulled += 1;
          batch.ack = async () => void acked.push(number);
          yield batch;
        }
      } finally {
        seen.ended += 1;
        await batches.close();
      }
    },
    async close() {
      seen.closed += 1;
    },
  };
  return source;
}

test("an element has a batch's rows, as float32", async () => {
  const data = begin("digits.train").dataset(tf, { xs: "x", ys: "y" });
  assert.ok(data instanceof tf.data.Dataset);
  const found = await collect(data);
  const batches = begin("digits.train");
  const expected = [];
  for await (const { size, tensors } of batches) {
    const xs = { shape: [size, 8, 8], dtype: "float32", values: Array.from(tensors.x.data) };
    expected.push({ xs, ys: { shape: [size], dtype: "float32", values: Array.from(tensors.y.data, Number) } });
  }
  assert.deepEqual(found, expected);
  await batches.close();
  await data.close();
});

test("native keeps integers as int32 and bool as bool", async () => {
  const names = { one: "1", two: "2", b: "b", c: "c" };
  const [found] = await collect(begin("mixed").dataset(tf, { xs: names, cast: "native" }));
  const dtypes = Object.entries(found).map(([name, { dtype, shape }]) => [name, dtype, shape]);
  assert.deepEqual(dtypes, [
    ["one", "float32", [8]], // bfloat16
    ["two", "float32", [8, 2]],
    ["b", "bool", [8, 3]],
    ["c", "float32", [8, 2]], // complex64: real and imaginary parts
  ]);
  assert.deepEqual(found.c.values.slice(0, 6), [0, 0, 1, -1, 2, -2]);
  const [{ dtype, values }] = await collect(begin("numbers").dataset(tf, { xs: "y", cast: "native" }));
  assert.deepEqual([dtype, values], ["int32", [0, 1, 2, 3, 4, 5, 6, 7]]);
});

for (const cast of ["float32", "native"]) {
  test(`an int64 that ${cast} does not hold is refused`, async () => {
    const data = begin("fixed").dataset(tf, { xs: "y", cast });
    assert.deepEqual(await collect(data), []);
    assert.throws(() => data.throwIfFailed(), TensorRange);
    await data.close();
  });
}

test("an integer that a tensor does not hold is shown to the digit, with advice that helps", async () => {
  const spec = { id: ["uint64", []], n: ["int32", []] };
  const writer = await openWriter("wide", { url: peer.url, spec, notify() {} });
  const epoch = await writer.epoch();
  await epoch.write({ id: 2n ** 53n + 1n, n: 2 ** 30 + 1 });
  await epoch.close();
  await writer.close();
  for (const [xs, cast, message] of [
    ["id", "float32", /integer 9007199254740993, which float32 .*: write it as float32, which rounds it, or in parts$/],
    ["id", "native", /integer 9007199254740993, which int32 .*: write it as float32, which rounds it, or in parts$/],
    ["n", "float32", /integer 1073741825, which float32 .*: give cast: "native", or write it as float32$/],
  ]) {
    const data = begin("wide").dataset(tf, { xs, cast });
    assert.deepEqual(await collect(data), []);
    assert.throws(() => data.throwIfFailed(), message);
  }
  assert.deepEqual((await collect(begin("wide").dataset(tf, { xs: "n", cast: "native" })))[0].values, [2 ** 30 + 1]);
});

test("names make a list, an object, or inputs alone", async () => {
  const [first] = await collect(begin("numbers").dataset(tf, { xs: ["x", "y"], ys: { label: "y" } }));
  assert.deepEqual([first.xs.length, Object.keys(first.ys)], [2, ["label"]]);
  const wrong = begin("numbers").dataset(tf, { xs: "z" });
  await collect(wrong);
  assert.throws(() => wrong.throwIfFailed(), /no tensor z, the stream has x, y/);
});

test("two datasets are zipped by name", async () => {
  const xs = begin("numbers").dataset(tf, { xs: "x" });
  const ys = begin("numbers").dataset(tf, { xs: "y" });
  const found = await collect(tf.data.zip({ xs, ys }));
  assert.deepEqual(found, await collect(begin("numbers").dataset(tf, { xs: "x", ys: "y" })));
});

test("bytes arrive as a Uint8Array a sample, and are decoded in map", async () => {
  const batches = begin("ragged");
  const expected = [];
  for await (const { size, tensors } of batches) {
    for (let row = 0; row < size; row += 1) expected.push([...tensors.name.sample(row).data]);
  }
  const each = begin("ragged").dataset(tf, { xs: "name", ys: "y", batchSize: null });
  const decode = (name) => {
    assert.ok(name instanceof Uint8Array);
    return tf.tensor1d([...name, 0, 0, 0, 0, 0, 0, 0, 0].slice(0, 8));
  };
  const decoded = await collect(each.map(({ xs, ys }) => ({ xs: decode(xs), ys })).batch(4));
  const values = decoded.flatMap(({ xs }) => xs.values);
  assert.deepEqual(
    values,
    expected.flatMap((bytes) => [...bytes, 0, 0, 0, 0, 0, 0, 0, 0].slice(0, 8)),
  );
  const [batch] = await collect(begin("ragged").dataset(tf, { xs: "name" }));
  assert.deepEqual(
    batch.map((one) => [...one]),
    expected.slice(0, 8),
  );
});

test("a ragged tensor is a list of tensors", async () => {
  const [batch] = await collect(begin("ragged").dataset(tf, { xs: "boxes" }));
  assert.deepEqual(
    batch.map(({ shape }) => shape),
    [0, 1, 2, 3, 0, 1, 2, 3].map((boxes) => [boxes, 4]),
  );
});

const CHAINS = {
  map: (data) => data.map(({ xs, ys }) => ({ xs: xs.mul(2), ys })),
  mapAsync: (data) => data.mapAsync(async ({ xs, ys }) => ({ xs: xs.neg(), kept: ys })),
  filter: (data) => data.filter(({ ys }) => ys.dataSync()[0] % 3 !== 0),
  take: (data) => data.take(3),
  "take nothing": (data) => data.take(0),
  "take all": (data) => data.take(-1),
  skip: (data) => data.skip(7),
  prefetch: (data) => data.prefetch(3),
  repeat: (data) => data.repeat(3),
  "repeat and take": (data) => data.repeat().take(95),
  batch: (data) => data.batch(7),
  "batch without the last": (data) => data.batch(7, false),
  shuffle: (data) => data.shuffle(10, "seed"),
  "shuffle, and again": (data) => data.shuffle(40, "seed").repeat(2),
  concatenate: (data) => data.take(2).concatenate(data.skip(38)),
  all: (data) =>
    data
      .skip(2)
      .shuffle(8, "all")
      .filter(({ ys }) => ys.dataSync()[0] % 2 === 0)
      .map(({ xs, ys }) => ({ xs: xs.add(1), ys }))
      .batch(3)
      .repeat(2)
      .prefetch(2)
      .take(9),
};

for (const [name, chain] of Object.entries(CHAINS)) {
  test(`${name} gives what tf.data gives of the same samples, and leaves no tensor`, async () => {
    const before = tf.memory().numTensors;
    const data = begin("numbers").dataset(tf, { xs: "x", ys: "y", batchSize: null });
    const found = await collect(chain(data));
    assert.equal(tf.memory().numTensors, before);
    const samples = Array.from({ length: 40 }, (_, n) => n);
    const same = tf.data.array(samples).map((n) => ({ xs: tf.tensor1d([n, n + 0.5]), ys: tf.scalar(n) }));
    assert.deepEqual(found, await collect(chain(same)));
    data.throwIfFailed();
    await data.close();
  });
}

test("batchSize joins and divides the source's batches", async () => {
  for (const batchSize of [3, 8, 15, 100]) {
    const found = await collect(begin("numbers", { batchSize: 6 }).dataset(tf, { xs: "x", ys: "y", batchSize }));
    assert.deepEqual(
      found.map(({ xs }) => xs.shape[0]),
      Array.from({ length: Math.ceil(40 / batchSize) }, (_, at) => Math.min(batchSize, 40 - at * batchSize)),
    );
    assert.deepEqual(
      found.flatMap(({ ys }) => ys.values),
      Array.from({ length: 40 }, (_, n) => n),
    );
  }
});

test("shuffle draws each row once, in another order in each pass, and a seed repeats it", async () => {
  const options = { xs: "y", batchSize: 4, shuffle: { window: 10, seed: 3 } };
  const passes = async () => {
    const data = begin("numbers").dataset(tf, options);
    return [await collect(data), await collect(data)].map((found) => found.flatMap(({ values }) => values));
  };
  const [first, second] = await passes();
  assert.notDeepEqual(first, second);
  const sorted = Array.from({ length: 40 }, (_, n) => n);
  for (const pass of [first, second])
    assert.deepEqual(
      pass.toSorted((a, b) => a - b),
      sorted,
    );
  assert.ok(Math.max(...first.map((n, at) => n - at)) < 10); // a window holds no more
  assert.deepEqual(await passes(), [first, second]);
  assert.throws(() => begin("numbers").dataset(tf, { xs: "y", shuffle: { window: 10, seed: 3 } }), BadOption);
});

const FIELDS = { xs: "x", ys: "y" };
const NUMBERS = Array.from({ length: 10 }, (_, n) => n);

test("a batch is acknowledged when its step ends, not when it is pulled", async () => {
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  const steps = [];
  const watch = { onBatchEnd: () => void steps.push([...source.seen.acked]) };
  await numberModel(tf).fitDataset(data.prefetch(4), { epochs: 1, verbose: 0, callbacks: [watch, data.callback] });
  assert.ok(source.seen.pulled > 1);
  assert.deepEqual(
    steps,
    NUMBERS.map((n) => NUMBERS.slice(0, n)),
  );
  assert.deepEqual(source.seen.acked, NUMBERS);
});

test("behind a zip that reads ahead, the steps acknowledge batches in order", async () => {
  const sources = [noted(), noted()];
  const [xs, ys] = sources.map((source, at) => dataset(source, tf, { xs: "xy"[at] }));
  const watch = {
    onBatchEnd: (step) => {
      for (const { seen } of sources) assert.deepEqual(seen.acked, NUMBERS.slice(0, step + 1));
    },
  };
  const callbacks = [xs.callback, ys.callback, watch];
  await numberModel(tf).fitDataset(tf.data.zip({ xs, ys }).prefetch(3), { epochs: 1, verbose: 0, callbacks });
  assert.equal(sources[0].seen.acked.length, 10);
});

const ACKNOWLEDGED = {
  "a filter drops batches": [(data) => data.filter(({ ys }) => ys.dataSync()[0] < 8), {}, 10],
  "skip leaves the first": [(data) => data.skip(2), {}, 10],
  "take leaves the last": [(data) => data.prefetch(3).take(4), {}, 4],
  "samples make other batches": [(data) => data.batch(7), { batchSize: null }, 10],
  "take leaves what a shuffle holds": [(data) => data.shuffle(1).take(3), {}, 3],
  "samples are shuffled": [(data) => data.shuffle(40).batch(5).prefetch(2), { batchSize: null }, 10],
  "the client makes other batches": [(data) => data.prefetch(2), { batchSize: 7 }, 10],
  "the client shuffles": [(data) => data, { batchSize: 3, shuffle: { window: 9, seed: 1 } }, 10],
};

for (const [name, [chain, options, count]] of Object.entries(ACKNOWLEDGED)) {
  test(`${name}: what nobody needs any more is acknowledged, once`, async () => {
    const source = noted();
    const data = dataset(source, tf, { ...FIELDS, ...options });
    await numberModel(tf).fitDataset(chain(data), { epochs: 1, verbose: 0, callbacks: data.callback });
    const { acked, ended, pulled } = source.seen;
    assert.deepEqual(
      acked.toSorted((a, b) => a - b),
      NUMBERS.slice(0, count),
    );
    assert.ok(count === 10 || pulled < 10);
    assert.equal(ended, 1); // take ends the source's iteration, which tf.data does not
  });
}

test("rows that a shuffle still holds keep their batch unacknowledged", async () => {
  const source = noted();
  const data = dataset(source, tf, { ...FIELDS, batchSize: null });
  const trained = new Set();
  const chain = data.shuffle(12, "held").map((sample) => {
    trained.add(sample.ys.dataSync()[0]);
    return sample;
  });
  const watch = {
    onBatchEnd: () => {
      for (const n of source.seen.acked) for (let row = 0; row < 4; row += 1) assert.ok(trained.has(4 * n + row));
    },
  };
  await numberModel(tf).fitDataset(chain.batch(4), { epochs: 1, verbose: 0, callbacks: [data.callback, watch] });
  assert.equal(source.seen.acked.length, 10);
});

test("an epoch of fitDataset is one iteration over the source", async () => {
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  await numberModel(tf).fitDataset(data.prefetch(2), { epochs: 3, verbose: 0, callbacks: data.callback });
  assert.deepEqual([source.seen.begun, source.seen.ended, source.seen.acked.length], [3, 3, 30]);
});

for (const [name, chain] of Object.entries({
  alone: (data) => data,
  prefetch: (data) => data.prefetch(4),
  repeat: (data) => data.repeat(),
  "map and shuffle": (data) => data.map((element) => element).shuffle(5),
  zip: (data) => {
    const ys = begin("numbers", { batchSize: 4 }).dataset(tf, { xs: "y" });
    return tf.data.zip({ xs: data.map(({ xs }) => xs), ys }).prefetch(3);
  },
})) {
  test(`an error of the source reaches fitDataset through ${name}`, async () => {
    const data = dataset(noted("numbers", 3), tf, FIELDS);
    const options = { epochs: 2, batchesPerEpoch: name === "repeat" ? 10 : undefined };
    const training = numberModel(tf).fitDataset(chain(data), { ...options, verbose: 0, callbacks: data.callback });
    await assert.rejects(training, /the source broke/);
    assert.throws(() => data.throwIfFailed(), /the source broke/);
    await assert.rejects(data.iterator(), /the source broke/);
  });
}

test("an evaluation's batches are acknowledged once it is asked for, unless it failed", async () => {
  const model = numberModel(tf);
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  await model.evaluateDataset(data.prefetch(3), { batches: 6 });
  assert.deepEqual(source.seen.acked, []);
  assert.equal(await data.acknowledge(), true);
  assert.deepEqual(source.seen.acked, NUMBERS.slice(0, 6)); // not what prefetch read
  const failing = noted("numbers", 3);
  const failed = dataset(failing, tf, FIELDS);
  await model.evaluateDataset(failed, {});
  await assert.rejects(failed.acknowledge(), /the source broke/);
  assert.deepEqual(failing.seen.acked, []);
});

test("a dataset that is closed during a step acknowledges nothing of it, and the training ends", async () => {
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  const close = { onBatchEnd: async (step) => void (step === 1 && (await data.close())) };
  await numberModel(tf).fitDataset(data, { epochs: 1, verbose: 0, callbacks: [close, data.callback] });
  assert.deepEqual(source.seen.acked, [0]);
});

test("an error of a map behind a prefetch reaches fitDataset", async () => {
  const data = dataset(noted(), tf, FIELDS);
  const broken = data.map(() => {
    throw new Error("the map broke");
  });
  const training = numberModel(tf).fitDataset(broken.prefetch(4), { epochs: 1, verbose: 0, callbacks: data.callback });
  await assert.rejects(training, /the map broke/);
});

test("an error of the source before the first batch reaches fitDataset", async () => {
  const data = dataset(noted("numbers", 0), tf, FIELDS);
  const training = numberModel(tf).fitDataset(data, { epochs: 1, verbose: 0, callbacks: data.callback });
  await assert.rejects(training, /the source broke/);
});

test("a loop of one's own tells the end of a step, and is told an error there", async () => {
  const source = noted("numbers", 1);
  const data = dataset(source, tf, FIELDS);
  const iterator = await data.prefetch(2).iterator();
  plain((await iterator.next()).value);
  await data.callback.onBatchEnd();
  assert.deepEqual(source.seen.acked, [0]);
  assert.equal((await iterator.next()).done, true);
  await assert.rejects(data.callback.onBatchEnd(), /the source broke/);
});

test("an error of an evaluation is thrown afterwards", async () => {
  const data = dataset(noted("numbers", 3), tf, FIELDS);
  await numberModel(tf).evaluateDataset(data, {});
  assert.throws(() => data.throwIfFailed(), /the source broke/);
});

test("an acknowledgement that fails ends the training", async () => {
  const source = begin("numbers");
  const failing = (async function* () {
    for await (const batch of source) {
      batch.ack = async () => {
        throw new Error("not acknowledged");
      };
      yield batch;
    }
  })();
  const data = dataset(failing, tf, FIELDS);
  const training = numberModel(tf).fitDataset(data, { epochs: 1, verbose: 0, callbacks: data.callback });
  await assert.rejects(training, /not acknowledged/);
});

test("close ends iterations that nobody finished, and closes the source", async () => {
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  const before = tf.memory().numTensors;
  const held = await (await data.prefetch(3).iterator()).next();
  await data.close();
  tf.dispose(held.value);
  assert.deepEqual([source.seen.begun, source.seen.ended, source.seen.closed], [1, 1, 1]);
  assert.equal(tf.memory().numTensors, before);
  await assert.rejects(data.iterator(), BadOption);
});

test("a new iteration ends one that was left, and two at a time are an error", async () => {
  const source = noted();
  const data = dataset(source, tf, FIELDS);
  const left = await data.iterator();
  plain((await left.next()).value);
  const next = await data.iterator();
  plain((await next.next()).value);
  assert.deepEqual([source.seen.begun, source.seen.ended], [2, 1]);
  assert.equal((await left.next()).done, true);
  assert.throws(() => data.throwIfFailed(), /two iterations/);
  await data.close();
});

test("callbacks of objects and of instances stand beside it", async () => {
  for (const beside of [{ onEpochEnd() {} }, tf.callbacks.earlyStopping({ monitor: "loss" })]) {
    const data = begin("numbers").dataset(tf, FIELDS);
    await numberModel(tf).fitDataset(data, { epochs: 2, verbose: 0, callbacks: [beside, data.callback] });
  }
});

test("memory is flat over 200 epochs", async () => {
  const trained = numberModel(tf);
  const data = begin("numbers", { shuffle: 1, window: 20 }).dataset(tf, { ...FIELDS, batchSize: null });
  const seen = [];
  const chain = data
    .filter(({ ys }) => ys.dataSync()[0] % 5 > 0)
    .map(({ xs, ys }) => ({ xs: xs.div(40), ys }))
    .batch(8)
    .prefetch(2);
  const watch = { onEpochEnd: () => void seen.push(tf.memory()) };
  await trained.fitDataset(chain, { epochs: 200, verbose: 0, callbacks: [data.callback, watch] });
  const [first] = seen;
  for (const { numTensors, numBytes, numDataBuffers } of seen.slice(1)) {
    assert.deepEqual([numTensors, numBytes, numDataBuffers], [first.numTensors, first.numBytes, first.numDataBuffers]);
  }
  assert.equal(seen.length, 200);
});

/** A model that recognises digits. Each one begins with the same weights. */
function digitsModel() {
  const dense = (units, seed, rest) =>
    tf.layers.dense({ units, kernelInitializer: tf.initializers.glorotUniform({ seed }), ...rest });
  const layers = [
    tf.layers.flatten({ inputShape: [8, 8] }),
    dense(64, 1, { activation: "relu" }),
    dense(10, 2, { activation: "softmax" }),
  ];
  const made = tf.sequential({ layers });
  made.compile({ optimizer: tf.train.adam(0.003), loss: "sparseCategoricalCrossentropy", metrics: ["accuracy"] });
  return made;
}

const scaled = ({ xs, ys }) => ({ xs: xs.div(16), ys });

test("fitDataset reaches 0.95 on digits that Python wrote", async () => {
  const trained = digitsModel();
  const data = begin("digits.train", { batchSize: 32, shuffle: 1 }).dataset(tf, FIELDS);
  const heldOut = begin("digits.test", { batchSize: 128 }).dataset(tf, FIELDS);
  await trained.fitDataset(data.map(scaled).prefetch(2), { epochs: 15, verbose: 0, callbacks: data.callback });
  const [, accuracy] = await trained.evaluateDataset(heldOut.map(scaled), {});
  heldOut.throwIfFailed();
  assert.ok(accuracy.dataSync()[0] >= 0.95, `${accuracy}`);
});

test("a training that stopped anywhere goes on with the exact next batch", async () => {
  const source = (state) => begin("digits.train", { batchSize: 64, shuffle: 7, window: 300, ...(state && { state }) });
  const epochs = 3;
  const train = async (trained, data, stopAfter = Number.POSITIVE_INFINITY, initialEpoch = 0) => {
    let steps = 0;
    const stop = {
      onBatchEnd: () => {
        steps += 1;
        if (steps === stopAfter) trained.stopTraining = true;
      },
    };
    const args = { epochs, initialEpoch, verbose: 0, callbacks: [data.callback, stop] };
    await trained.fitDataset(data.map(scaled).prefetch(3), args);
  };
  const weights = (trained) => trained.getWeights().map((weight) => Array.from(weight.dataSync()));
  const whole = digitsModel();
  await train(whole, source().dataset(tf, FIELDS));
  for (const stopAfter of [1, 23, 30]) {
    const stopped = digitsModel();
    const begun = source().dataset(tf, FIELDS);
    await train(stopped, begun, stopAfter);
    const state = JSON.parse(JSON.stringify(begun.state()));
    assert.deepEqual([state.pass, state.batches], [Math.floor((stopAfter - 1) / 23), ((stopAfter - 1) % 23) + 1]);
    const goesOn = source(state).dataset(tf, FIELDS);
    await train(stopped, goesOn, Number.POSITIVE_INFINITY, state.pass);
    assert.deepEqual(weights(stopped), weights(whole));
    await begun.close();
  }
});

test("a dataset that forms its own batches has no state to resume by", async () => {
  const data = begin("numbers").dataset(tf, { ...FIELDS, batchSize: 5 });
  assert.throws(() => data.state(), BadOption); // before the first step
  await numberModel(tf).fitDataset(data, { epochs: 1, verbose: 0, callbacks: data.callback });
  assert.throws(() => data.state(), /resumes by the source's batches/);
});

/** Compile a project of `types`, which reads the types of dist. */
const compile = (project) =>
  execFileSync(process.execPath, [COMPILER, "--project", project], { cwd: TYPES, stdio: "inherit" });

test("the types of TensorFlow.js fit those of the package", () => {
  compile(".");
});

test("the snippets of the page compile, in a page without types of Node", () => {
  const text = readFileSync(new URL("../../docs/tensorflow-js.md", import.meta.url), "utf8");
  const folder = mkdtempSync(join(TYPES, "page-"));
  try {
    for (const [at, [, code]] of [...text.matchAll(/^```(?:js|html)\n(.*?)^```/gms)].entries()) {
      const script = /<script type="module">\n(.*?)<\/script>/s.exec(code)?.[1] ?? code;
      const isPage = script !== code;
      const lines = script.split("\n").filter((line) => !/console\.log/.test(line)); // of values that may be undefined
      const head = isPage ? ['import * as tf from "@tensorflow/tfjs";'] : [];
      const given = [...head, ...lines].join("\n").replace(/"\.\/.*browser\.js"/, '"penstock-js/browser"');
      writeFileSync(join(folder, `${at}.ts`), given);
    }
    const lib = { lib: ["es2022", "dom"], types: [], noEmit: true, noUnusedLocals: false, rootDir: "../../.." };
    writeFileSync(
      join(folder, "tsconfig.json"),
      JSON.stringify({ extends: "../../../tsconfig.json", compilerOptions: lib, include: ["."] }),
    );
    compile(folder);
  } finally {
    rmSync(folder, { recursive: true });
  }
});
