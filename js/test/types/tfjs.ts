// This compiles: the user's `tf` fits the package's types, and a dataset is one that fitDataset takes.
import * as tf from "@tensorflow/tfjs";
import { load as inPage } from "../../dist/browser.js";
import { dataset, load, replay } from "../../dist/index.js";

export async function train(model: tf.LayersModel): Promise<tf.History> {
  await using data = replay("train", { epoch: 0, batchSize: 32 }).dataset(tf, { xs: "x", ys: ["y"], cast: "native" });
  const scaled: tf.data.Dataset<{ xs: tf.Tensor; ys: tf.Tensor }> = data.map(({ xs, ys }) => ({ xs: xs.div(255), ys }));
  const history = await model.fitDataset(scaled.prefetch(2), { epochs: 2, callbacks: [data.callback] });
  data.throwIfFailed();
  return history;
}

export function zipped(): tf.data.Dataset<tf.TensorContainer> {
  const named = { xs: { input: "a" }, batchSize: null, shuffle: { window: 100, seed: 1 } };
  const source = replay("train", { epoch: 0, batchSize: 32 });
  return tf.data.zip({ one: dataset(source, tf, named), two: dataset(source, tf, { xs: "b" }) });
}

export async function asMember(model: tf.LayersModel): Promise<void> {
  const loader = load("train", { group: "resnet", batchSize: 32, acknowledge: "manual" });
  const data = loader.dataset(tf, { xs: { input: "x" }, ys: "y" });
  await model.fitDataset(data.prefetch(2), { epochs: 1, callbacks: { onBatchEnd: () => data.callback.onBatchEnd() } });
  await data.close();
}

export async function evaluate(model: tf.LayersModel): Promise<boolean> {
  const through = { group: "resnet", url: "ws://localhost:8466", token: "t" };
  const loader = inPage("train", { ...through, batchSize: 32, acknowledge: "manual" });
  const data = loader.dataset(tf, { xs: "x", ys: "y" });
  await model.evaluateDataset(data, {});
  await model.evaluateDataset(data.map(({ xs, ys }) => ({ xs: xs.div(255), ys })).take(3), {});
  for await (const batch of loader) if (!(await batch.ack())) return false;
  return await data.acknowledge();
}
