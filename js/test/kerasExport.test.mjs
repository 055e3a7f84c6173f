// Models that penstock.keras.to_tfjs wrote predict in Node and in Chromium what they predict in Keras, and are trained on.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import * as tf from "@tensorflow/tfjs";
import { noChromium, serveFolder, startChromium } from "./chromium.mjs";
import { predict, train } from "./kerasParity.mjs";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const folder = mkdtempSync(join(tmpdir(), "penstock-export-"));
// TensorFlow.js 4.22 computes the gradient of UpSampling2D wrongly on its cpu backend, for batches of more than one row.
const WRONG_ON_CPU = ["upsampled"];

const PAGE = readFileSync(join(ROOT, "docs/model-in-a-browser.md"), "utf8");
const PYTHONPATH = ["common", "producer", "consumer", "front"].map((one) => join(ROOT, one)).join(delimiter);
python(join(ROOT, "js/test/kerasModels.py"), folder);
const cases = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8"));

after(() => rmSync(folder, { recursive: true }));

/** Run Python in the folder, and return what it printed. */
function python(...args) {
  const env = { ...process.env, PYTHONPATH, TF_CPP_MIN_LOG_LEVEL: "3" };
  const options = { cwd: folder, env, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] };
  return execFileSync(join(ROOT, ".venv/bin/python"), args, options);
}

/** Return the only block of the page in a language. */
function block(language) {
  const found = [...PAGE.matchAll(new RegExp(`^\`\`\`${language}\\n(.*?)^\`\`\``, "gms"))];
  assert.equal(found.length, 1);
  return found[0][1];
}

/** Load an exported model as docs/model-in-a-browser.md says for Node. */
function load(name) {
  const read = (file) => readFileSync(join(folder, name, file));
  const { modelTopology, weightsManifest } = JSON.parse(read("model.json"));
  const weightSpecs = weightsManifest.flatMap(({ weights }) => weights);
  const weightData = new Uint8Array(Buffer.concat(weightsManifest.flatMap(({ paths }) => paths.map(read)))).buffer;
  return tf.loadLayersModel(tf.io.fromMemory({ modelTopology, weightSpecs, weightData }));
}

function assertTrained({ off, losses, unchanged, trainable }, one) {
  assert.ok(off < 1e-5, `outputs after a step of training differ by ${off}`);
  assert.ok(losses[1] < losses[0], `the loss goes from ${losses}`);
  assert.deepEqual(unchanged, []);
  assert.equal(trainable, one.trainable);
}

describe("Node", () => {
  before(() => tf.setBackend("cpu"));
  for (const one of cases)
    test(one.name, async () => {
      const model = await load(one.name);
      const off = await predict(tf, model, one);
      assert.ok(off < 1e-5, `outputs differ by ${off}`);
      if (!WRONG_ON_CPU.includes(one.name)) assertTrained(await train(tf, model, one), one);
      model.dispose();
    });
});

test("the page of the documentation exports a model, and trains it on in Node", () => {
  assert.match(
    python("-c", block("python")),
    /conv2d\/kernel +3x3x1x8 +288\n[\s\S]*4 weights of float32, 680 bytes\n$/,
  );
  symlinkSync(join(ROOT, "js/node_modules"), join(folder, "node_modules"));
  writeFileSync(join(folder, "page.mjs"), block("js"));
  const printed = execFileSync(process.execPath, ["page.mjs"], { cwd: folder, encoding: "utf8", stdio: "pipe" });
  assert.match(printed, /^170$/m);
});

describe("Chromium", { skip: noChromium }, () => {
  let chromium;
  let page;
  let site;

  before(async () => {
    cpSync(join(ROOT, "js/node_modules/@tensorflow/tfjs/dist/tf.min.js"), join(folder, "tf.min.js"));
    cpSync(join(ROOT, "js/test/kerasParity.mjs"), join(folder, "kerasParity.mjs"));
    writeFileSync(join(folder, "index.html"), '<script src="tf.min.js"></script>');
    site = await serveFolder(folder);
    chromium = await startChromium();
    page = await chromium.open(site.url);
    assert.equal(await page.evaluate("tf.ready().then(() => tf.getBackend())"), "webgl");
  });

  after(async () => {
    await chromium.close();
    await site.close();
  });

  test("the page of the documentation", async () => {
    writeFileSync(join(folder, "documented.html"), block("html"));
    const documented = await chromium.open(`${site.url}documented.html`);
    await documented.waitForFunction(() => document.title === "10 classes");
    await documented.close();
  });

  /** Call a function of kerasParity.mjs in the page. */
  const call = (name, one) =>
    page.evaluate(
      async ([name, one]) => {
        const parity = await import("/kerasParity.mjs");
        const model = await globalThis.tf.loadLayersModel(`${one.name}/model.json`);
        return parity[name](globalThis.tf, model, one);
      },
      [name, one],
    );

  for (const one of cases)
    test(one.name, async () => {
      const off = await call("predict", one);
      assert.ok(off < 1e-5, `outputs differ by ${off}`);
      if (WRONG_ON_CPU.includes(one.name)) assertTrained(await call("train", one), one);
    });
});
