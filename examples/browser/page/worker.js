// The model, in a thread of its own. It answers questions of page.mjs in order, and keeps no tensor but the weights.
importScripts("tf.min.js", "tf-backend-wasm.min.js");

/* global tf */
const SIDE = 32;
const PREFERRED = ["webgl", "wasm", "cpu"];
const LOOKED_AT = 256; // the longer side of a picture, in pixels, in which the digit is looked for
const FAINTEST = 0.35; // of the darkest ink; what is fainter is paper

let model = null;
let pixels = new Uint8Array(0); // of the newest picture, or none

tf.wasm.setWasmPaths("./");

const questions = {
  /** Load the model on the first backend that starts, and tell which ones do. */
  async load({ model: url }) {
    const backends = [];
    for (const name of PREFERRED) if (await tf.setBackend(name).catch(() => false)) backends.push(name);
    await tf.setBackend(backends[0]);
    model = await tf.loadLayersModel(url);
    return { backend: tf.getBackend(), backends };
  },

  async backend({ backend }) {
    if (!(await tf.setBackend(backend))) throw new Error(`The backend ${backend} does not start here.`);
    return { backend: tf.getBackend() };
  },

  /** Look for a digit in a picture, and say which one it is. */
  async picture({ picture }) {
    pixels = findDigit(picture);
    picture.close();
    return questions.again();
  },

  /** Say again which digit the newest picture shows. */
  async again() {
    if (model === null || pixels.length === 0) return { probabilities: null, pixels, ms: 0, ...memory() };
    const begin = performance.now();
    const probabilities = await predict();
    return { probabilities, pixels, ms: performance.now() - begin, ...memory() };
  },

  async many({ count, id }) {
    if (pixels.length === 0) pixels = new Uint8Array(SIDE * SIDE);
    const begin = performance.now();
    for (let done = 1; done <= count; done += 1) {
      await predict();
      if (done % 50 === 0) postMessage({ id, progress: done });
    }
    return { ms: performance.now() - begin, ...memory() };
  },
};

/** Return the probability of each digit. All tensors of it are disposed of. */
async function predict() {
  const output = tf.tidy(() => model.predict(tf.tensor(pixels, [1, SIDE, SIDE, 1], "int32")));
  const probabilities = Array.from(await output.data());
  output.dispose();
  return probabilities;
}

function memory() {
  const { numBytes, numTensors, numBytesInGPU } = tf.memory();
  return { bytes: numBytes, tensors: numTensors, gpu: numBytesInGPU ?? 0 };
}

/** Return a picture as the model was trained: the digit alone, 8 pixels high, enlarged to 32 x 32, light on dark. */
function findDigit(picture) {
  const scale = Math.min(1, LOOKED_AT / Math.max(picture.width, picture.height));
  const [width, height] = [picture.width, picture.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = new OffscreenCanvas(width, height).getContext("2d");
  canvas.fillStyle = "#ffffff"; // behind what is transparent
  canvas.fillRect(0, 0, width, height);
  canvas.drawImage(picture, 0, 0, width, height);
  const ink = inkOf(canvas.getImageData(0, 0, width, height));
  const box = boxOf(ink, width, height);
  if (box === null) return new Uint8Array(0);
  const small = new ImageData(8, 8);
  for (let row = 0; row < 8; row += 1)
    for (let column = 0; column < 8; column += 1) {
      const value = 255 * mean(ink, width, height, box, row, column);
      small.data.set([value, value, value, 255], 4 * (8 * row + column));
    }
  const eight = new OffscreenCanvas(8, 8);
  eight.getContext("2d").putImageData(small, 0, 0);
  const large = new OffscreenCanvas(SIDE, SIDE).getContext("2d");
  Object.assign(large, { imageSmoothingEnabled: true, imageSmoothingQuality: "high" });
  large.drawImage(eight, 0, 0, SIDE, SIDE);
  return large.getImageData(0, 0, SIDE, SIDE).data.filter((_, index) => index % 4 === 0);
}

/** Return how much ink each pixel has, from 0 to 1. The paper is what most of the border shows, light or dark. */
function inkOf({ data, width, height }) {
  const grey = Float32Array.from({ length: width * height }, (_, index) => {
    const [red, green, blue] = data.subarray(4 * index, 4 * index + 3);
    return 0.299 * red + 0.587 * green + 0.114 * blue;
  });
  const isBorder = (_, index) =>
    index < width || index >= width * (height - 1) || index % width === 0 || (index + 1) % width === 0;
  const border = grey.filter(isBorder).sort();
  const paper = border[border.length >> 1];
  const ink = grey.map((value) => Math.abs(value - paper));
  const darkest = ink.reduce((a, b) => Math.max(a, b), 0);
  return darkest < 32 ? ink.fill(0) : ink.map((value) => value / darkest);
}

/** Return the square around the ink, or null if there is none. A narrow digit stands in the middle of its square. */
function boxOf(ink, width, height) {
  let [top, bottom, left, right] = [height, -1, width, -1];
  for (let row = 0; row < height; row += 1)
    for (let column = 0; column < width; column += 1)
      if (ink[row * width + column] > FAINTEST) {
        [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
        [left, right] = [Math.min(left, column), Math.max(right, column)];
      }
  if (bottom < 0) return null;
  const side = Math.max(bottom - top, right - left) + 1;
  return { top: (top + bottom + 1 - side) / 2, left: (left + right + 1 - side) / 2, side };
}

/** Return the mean ink of one of the 8 x 8 parts of a square, which may reach beyond the picture. */
function mean(ink, width, height, { top, left, side }, row, column) {
  const part = side / 8;
  let sum = 0;
  let count = 0;
  for (let y = Math.floor(top + row * part); y < top + (row + 1) * part; y += 1)
    for (let x = Math.floor(left + column * part); x < left + (column + 1) * part; x += 1) {
      count += 1;
      if (y >= 0 && y < height && x >= 0 && x < width) sum += ink[y * width + x];
    }
  return sum / count;
}

let queue = Promise.resolve();

addEventListener("message", ({ data: { id, what, ...options } }) => {
  queue = queue
    .then(() => questions[what]({ id, ...options }))
    .then((answer) => postMessage({ id, ...answer }))
    .catch((error) => postMessage({ id, error: error.message }));
});
