// Trains on photos that workers decoded once, for 32 epochs. Killed at any moment and started again, it goes on behind
// its last checkpoint, and ends with the same weights.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { deserialize, serialize } from "node:v8";
import * as tf from "@tensorflow/tfjs";
import "@tensorflow/tfjs-backend-wasm";
import { replay } from "penstock-js";

const { values } = parseArgs({
  options: {
    epochs: { type: "string", default: "32" },
    every: { type: "string", default: "50" }, // steps between two checkpoints
    checkpoint: { type: "string", default: "photos.checkpoint" },
  },
});
const [epochs, every] = [Number(values.epochs), Number(values.every)];
await tf.setBackend("wasm");

const saved = existsSync(values.checkpoint) ? deserialize(readFileSync(values.checkpoint)) : null;
const options = { epoch: 0, batchSize: 64, prefetchBytes: 32 * 2 ** 20 };
const photos = replay("photos.train", { ...options, shuffle: 1, ...(saved && { state: saved.state }) });
const { spec, samples, info } = await photos.open();
const [height, width, channels] = spec.find(({ name }) => name === "x").shape;

/** The model sees averages of 4 x 4 pixels: the wasm backend is slow at gradients of large matrices. */
const POOL = 4;

/** A dense model: the wasm backend cannot train convolutions. */
function newModel() {
  const dense = (units, seed, activation) =>
    tf.layers.dense({ units, activation, kernelInitializer: tf.initializers.glorotUniform({ seed }) });
  const inputShape = [height / POOL, width / POOL, channels];
  const layers = [tf.layers.flatten({ inputShape }), dense(32, 1, "relu"), dense(info.classes.y.length, 2, "softmax")];
  const made = tf.sequential({ layers });
  made.compile({
    optimizer: tf.train.momentum(0.003, 0.9),
    loss: "sparseCategoricalCrossentropy",
    metrics: ["accuracy"],
  });
  return made;
}

const model = saved === null ? newModel() : await tf.loadLayersModel(tf.io.fromMemory(saved.artifacts));
const scaled = ({ xs, ys }) => ({ xs: tf.avgPool(xs, POOL, POOL, "valid").div(255), ys });
const data = photos.dataset(tf, { xs: "x", ys: "y" });
let steps = saved?.steps ?? 0;
if (saved !== null) console.log(`goes on after step ${steps}`);

/** Write a checkpoint: the weights, the optimizer, and where the data stands. The file is complete or does not exist. */
const save = tf.io.withSaveHandler(async (artifacts) => {
  writeFileSync(`${values.checkpoint}.new`, serialize({ artifacts, state: data.state(), steps }));
  renameSync(`${values.checkpoint}.new`, values.checkpoint);
  return { modelArtifactsInfo: { dateSaved: new Date(), modelTopologyType: "JSON" } };
});

let began = performance.now();
let stepsBefore = steps;
const watch = {
  onBatchEnd: async () => {
    steps += 1;
    if (steps % every === 0) await model.save(save, { includeOptimizer: true });
  },
  onEpochEnd: async (epoch, { loss, acc }) => {
    if (loss === undefined) return; // the checkpoint was of a pass's last step
    const rate = ((steps - stepsBefore) * options.batchSize * 1000) / (performance.now() - began);
    const memory = process.memoryUsage.rss() / 1e6;
    console.log(
      `epoch ${epoch}: loss ${loss.toFixed(4)}, accuracy ${acc.toFixed(3)}, ${rate.toFixed(0)} photos/s, ` +
        `${memory.toFixed(0)} MB`,
    );
    began = performance.now();
    stepsBefore = steps;
  },
};

console.log(`${samples} photos of ${height} x ${width}, ${info.classes.y.length} classes`);
await model.fitDataset(data.map(scaled).prefetch(2), {
  epochs,
  initialEpoch: saved?.state.pass ?? 0,
  verbose: 0,
  callbacks: [data.callback, watch], // the dataset's first: a checkpoint holds the step that has just ended
});
await data.close();

const heldOut = replay("photos.val", options).dataset(tf, { xs: "x", ys: "y" });
const [, accuracy] = await model.evaluateDataset(heldOut.map(scaled), {});
heldOut.throwIfFailed();
await heldOut.close();
const digest = createHash("sha256");
for (const weight of model.getWeights()) digest.update(weight.dataSync());
console.log(`accuracy on held-out photos ${accuracy.dataSync()[0].toFixed(3)}`);
console.log(`weights ${digest.digest("hex").slice(0, 16)} after ${steps} steps`);
console.log(`peak memory ${(process.resourceUsage().maxRSS / 1000).toFixed(0)} MB`);
