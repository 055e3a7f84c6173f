// The page: it draws, takes pictures, and shows. The model is in worker.js, so that the page never waits for it.
const MODEL = "model/model.json";
const at = (id) => document.getElementById(id);
const ink = at("paper").getContext("2d", { willReadFrequently: true });
const worker = new Worker("worker.js");
const asked = new Map();
let lastId = 0;

worker.onmessage = ({ data: { id, progress, error, ...answer } }) => {
  if (progress !== undefined) {
    at("progress").value = progress;
    return;
  }
  const { resolve, reject } = asked.get(id);
  asked.delete(id);
  if (error === undefined) resolve(answer);
  else reject(new Error(error));
};

/** Ask the worker for something. */
function ask(what, options = {}, transfer = []) {
  lastId += 1;
  worker.postMessage({ id: lastId, what, ...options }, transfer);
  return new Promise((resolve, reject) => asked.set(lastId, { resolve, reject }));
}

/** Run a step, and say on the page what went wrong in it. */
const saying =
  (step) =>
  async (...args) => {
    try {
      await step(...args);
    } catch (error) {
      at("size").textContent = error.message;
    }
  };

// --- the model, whose size is known before it is loaded -------------------------------------------------------------

const kilobytes = (bytes) => (bytes < 1e6 ? `${Math.round(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

/** Return the bytes of the model's files: those that the server names, else those that the manifest implies. */
async function modelSize() {
  const answer = await fetch(MODEL);
  if (!answer.ok) throw new Error(`There is no model at ${MODEL}: run make.py.`);
  const { weightsManifest } = await answer.json();
  const groups = weightsManifest.map(async ({ paths, weights }) => {
    const heads = await Promise.all(paths.map((path) => fetch(new URL(path, answer.url), { method: "HEAD" })));
    const told = heads.map(({ headers }) => Number(headers.get("Content-Length")));
    const implied = weights.reduce((sum, { shape }) => sum + 4 * shape.reduce((a, b) => a * b, 1), 0);
    return { bytes: told.every(Boolean) ? told.reduce((a, b) => a + b) : implied, files: paths.length };
  });
  return (await Promise.all(groups)).reduce((a, b) => ({ bytes: a.bytes + b.bytes, files: a.files + b.files }));
}

const announce = saying(async () => {
  const { bytes, files } = await modelSize();
  at("size").textContent =
    `The model has ${kilobytes(bytes)} of weights in ${files} ${files === 1 ? "file" : "files"}. Nothing is loaded yet.`;
  at("load").textContent = `Load the model (${kilobytes(bytes)})`;
  at("load").disabled = false;
});

const load = saying(async () => {
  at("load").disabled = true;
  at("size").textContent = "Loading.";
  try {
    const { backend, backends } = await ask("load", { model: new URL(MODEL, location.href).href });
    at("backend").replaceChildren(...backends.map((name) => new Option(name, name, false, name === backend)));
    at("load").textContent = "Loaded";
    at("size").textContent = `The model is loaded, and runs on ${backend}.`;
  } catch (error) {
    at("load").disabled = false;
    throw error;
  }
  for (const id of ["backend", "many"]) at(id).disabled = false;
  await show(await ask("again"));
});

const changeBackend = saying(async () => {
  const { backend } = await ask("backend", { backend: at("backend").value });
  await show(await ask("again"));
  at("size").textContent = `The model runs on ${backend}.`;
});

const predictMany = saying(async () => {
  for (const id of ["many", "backend"]) at(id).disabled = true;
  at("progress").hidden = false;
  const { ms, ...answer } = await ask("many", { count: 1000 });
  for (const id of ["many", "backend"]) at(id).disabled = false;
  at("progress").hidden = true;
  at("rate").textContent = `${(ms / 1000).toFixed(1)} s, ${(ms / 1000).toFixed(2)} ms each`;
  showMemory(answer);
});

// --- what the model says --------------------------------------------------------------------------------------------

const bars = Array.from({ length: 10 }, (_, digit) => {
  const bar = document.createElement("li");
  bar.innerHTML = `<span>${digit}</span><span class="bar"><i></i></span><span></span>`;
  return bar;
});
at("bars").append(...bars);

function showMemory({ bytes, tensors, gpu }) {
  at("memory").textContent = gpu > 0 ? `${kilobytes(bytes)}, on the GPU ${kilobytes(gpu)}` : kilobytes(bytes);
  at("tensors").textContent = tensors;
}

async function show({ probabilities, pixels, ms, ...memory }) {
  showMemory(memory);
  const best = probabilities === null ? -1 : probabilities.indexOf(Math.max(...probabilities));
  at("digit").value = best < 0 ? "?" : best;
  if (best >= 0) at("time").textContent = `${ms.toFixed(1)} ms`;
  for (const [digit, bar] of bars.entries()) {
    const share = probabilities?.[digit] ?? 0;
    bar.classList.toggle("best", digit === best);
    bar.querySelector("i").style.width = `${100 * share}%`;
    bar.lastElementChild.textContent = best < 0 ? "" : `${(100 * share).toFixed(0)} %`;
  }
  const grey = pixels.length > 0 ? pixels : new Uint8Array(32 * 32);
  const image = new ImageData(32, 32);
  for (const [index, value] of grey.entries()) image.data.set([value, value, value, 255], 4 * index);
  at("seen").getContext("2d").putImageData(image, 0, 0);
}

let isBusy = false;
let waiting = null;

/** Show what the model says of a picture. While it is busy, only the newest picture waits. */
const classify = saying(async (picture) => {
  waiting?.close();
  waiting = picture;
  if (isBusy) return;
  isBusy = true;
  try {
    while (waiting !== null) {
      const next = waiting;
      waiting = null;
      await show(await ask("picture", { picture: next }, [next]));
    }
  } finally {
    isBusy = false;
  }
});

// --- drawing and dropping -------------------------------------------------------------------------------------------

function clear() {
  ink.fillStyle = "#ffffff";
  ink.fillRect(0, 0, 320, 320);
}

const place = ({ offsetX, offsetY, target }) => [
  (offsetX * 320) / target.clientWidth,
  (offsetY * 320) / target.clientHeight,
];
const classifyPaper = async () => classify(await createImageBitmap(at("paper")));

function begin(event) {
  event.target.setPointerCapture(event.pointerId);
  ink.beginPath();
  ink.moveTo(...place(event));
  move(event);
}

function move(event) {
  if (event.buttons === 0) return;
  ink.lineTo(...place(event));
  Object.assign(ink, { lineWidth: 26, lineCap: "round", lineJoin: "round", strokeStyle: "#000000" });
  ink.stroke();
  classifyPaper();
}

const open = saying(async (file) => {
  if (file === undefined) return;
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that this browser can open.`);
  });
  clear();
  const scale = Math.min(320 / picture.width, 320 / picture.height);
  const [width, height] = [picture.width * scale, picture.height * scale];
  ink.drawImage(picture, (320 - width) / 2, (320 - height) / 2, width, height);
  await classify(picture);
});

at("paper").addEventListener("pointerdown", begin);
at("paper").addEventListener("pointermove", move);
at("clear").addEventListener("click", () => {
  clear();
  classifyPaper();
});
at("file").addEventListener("change", ({ target }) => open(target.files[0]));
at("load").addEventListener("click", load);
at("backend").addEventListener("change", changeBackend);
at("many").addEventListener("click", predictMany);
for (const name of ["dragenter", "dragover", "dragleave", "drop"])
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", name === "dragenter" || name === "dragover");
    if (name === "drop") open(event.dataTransfer.files[0]);
  });

clear();
announce();
