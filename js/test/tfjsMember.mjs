// A member that trains with fitDataset, and stops for ever after some steps: a test kills it there.
import * as tf from "@tensorflow/tfjs";
import "@tensorflow/tfjs-backend-wasm";
import { load } from "../dist/index.js";
import { numberModel } from "./tfjsModel.mjs";

const { stream, steps, ...options } = JSON.parse(process.argv[2]);
await tf.setBackend("wasm");
const data = load(stream, { acknowledge: "manual", ...options }).dataset(tf, { xs: "x", ys: "y" });
const trained = [];
const chain = data.map((element) => {
  trained.push(Array.from(element.ys.dataSync()));
  return element;
});
let done = 0;
const stop = {
  onBatchEnd: async () => {
    done += 1;
    if (done < steps) return;
    process.stdout.write(`${JSON.stringify({ acknowledged: trained.slice(0, steps), read: trained.length })}\n`);
    await new Promise(() => {});
  },
};
await numberModel(tf).fitDataset(chain.prefetch(3), { epochs: 1, verbose: 0, callbacks: [data.callback, stop] });
