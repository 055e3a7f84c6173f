// A page around a model in ONNX: bytes become numbers as in training, and the most probable kinds are shown.
import * as ort from "./ort.wasm.bundle.min.mjs";

const at = (id) => document.getElementById(id);
const SPACES = new Set([9, 10, 11, 12, 13, 32]); // what Python's bytes.strip() removes

ort.env.wasm.numThreads = 1; // more need headers that few static servers send
const [session, config] = await Promise.all([
  ort.InferenceSession.create("model.onnx"),
  fetch("config.min.json").then((answer) => answer.json()),
]);
at("size").textContent = `The model knows ${config.target_labels_space.length} kinds of files.`;

/** Return what the model was trained on: the first and the last bytes without spaces around them, filled up. */
async function featuresOf(file) {
  const { beg_size: first, end_size: last, block_size: block, padding_token: filler } = config;
  const begin = new Uint8Array(await file.slice(0, block).arrayBuffer());
  const end = new Uint8Array(await file.slice(Math.max(0, file.size - block)).arrayBuffer());
  const isText = (byte) => !SPACES.has(byte);
  const from = begin.findIndex(isText);
  const head = from < 0 ? [] : begin.subarray(from, from + first);
  const tail = end.subarray(0, end.findLastIndex(isText) + 1).slice(-last);
  const features = new Int32Array(first + last).fill(filler);
  features.set(head);
  features.set(tail, first + last - tail.length);
  return new ort.Tensor("int32", features, [1, first + last]);
}

async function classify(file) {
  if (file === undefined) return;
  if (file.size < config.min_file_size_for_dl) {
    at("size").textContent = `${file.name} is too short to tell.`;
    return;
  }
  const begin = performance.now();
  const { [session.outputNames[0]]: output } = await session.run({ [session.inputNames[0]]: await featuresOf(file) });
  const ms = performance.now() - begin;
  const ranked = Array.from(output.data, (share, index) => ({ share, kind: config.target_labels_space[index] }));
  ranked.sort((a, b) => b.share - a.share);
  at("digit").value = ranked[0].kind;
  at("size").textContent = `${file.name}, in ${ms.toFixed(1)} ms`;
  at("bars").replaceChildren(...ranked.slice(0, 5).map(barOf));
  document.title = `${file.name}: ${ranked[0].kind}`;
}

function barOf({ share, kind }, index) {
  const bar = document.createElement("li");
  bar.className = index === 0 ? "best" : "";
  bar.innerHTML = '<span></span><span class="bar"><i></i></span><span></span>';
  bar.firstElementChild.textContent = kind;
  bar.querySelector("i").style.width = `${100 * share}%`;
  bar.lastElementChild.textContent = `${(100 * share).toFixed(0)} %`;
  return bar;
}

at("file").addEventListener("change", ({ target }) => classify(target.files[0]));
for (const name of ["dragenter", "dragover", "dragleave", "drop"])
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", name === "dragenter" || name === "dragover");
    if (name === "drop") classify(event.dataTransfer.files[0]);
  });
