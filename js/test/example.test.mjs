// The example of TensorFlow.js as its README says, with a small folder: each photo is opened once for all epochs, and a
// training that was killed ends with the weights of one that was not.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, renameSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { startPeer } from "./peer.mjs";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const EXAMPLE = join(ROOT, "examples/tfjs");
const MOST_MB = 400;
const folder = mkdtempSync(join(tmpdir(), "penstock-example-"));
const lines = [...readFileSync(join(EXAMPLE, "README.md"), "utf8").matchAll(/^```sh\n(.*?)^```/gms)].flatMap(
  ([, block]) => block.split("\n").map((line) => line.replace(/ +#.*/, "")),
);

let peer;
let env;
let photos;

before(async () => {
  peer = await startPeer();
  cpSync(EXAMPLE, folder, { recursive: true, filter: (path) => !path.includes("node_modules") });
  const modules = join(folder, "node_modules");
  mkdirSync(modules);
  symlinkSync(join(ROOT, "js"), join(modules, "penstock-js"));
  for (const name of ["@redis", "@tensorflow", "sharp"])
    symlinkSync(join(ROOT, "js/node_modules", name), join(modules, name));
  const PATH = [join(ROOT, ".venv/bin"), join(process.execPath, ".."), process.env.PATH].join(delimiter);
  const PYTHONPATH = ["common", "producer", "consumer", "front"].map((one) => join(ROOT, one)).join(delimiter);
  env = { ...process.env, PATH, PYTHONPATH, PENSTOCK_URL: peer.url };
  execFileSync("sh", ["-c", `${line("python photos.py")} --gigabytes 0.004 --side 160`], { cwd: folder, env });
  photos = readdirSync(join(folder, "photos"), { recursive: true }).filter((name) => name.includes("."));
  for (const ending of [".jpg", ".webp"]) assert.ok(photos.some((name) => name.endsWith(ending)));
});

after(async () => {
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

/** Return the README's line that begins so. */
function line(start) {
  const found = lines.filter((one) => one.startsWith(start));
  assert.equal(found.length, 1, `the README has ${found.length} lines of ${start}`);
  return found[0];
}

/** Run a line of the README, which may be killed once it prints a line that begins so. Returns what it printed. */
async function run(command, options, killAt = null) {
  const given = `exec ${line(command)} ${options}`;
  const child = spawn("sh", ["-c", given], { cwd: folder, env, stdio: ["ignore", "pipe", "inherit"] });
  const ended = once(child, "exit");
  const printed = [];
  for await (const text of createInterface({ input: child.stdout })) {
    printed.push(text);
    if (killAt !== null && text.startsWith(killAt)) child.kill("SIGKILL");
  }
  const [code, signal] = await ended;
  assert.equal(code ?? signal, killAt === null ? 0 : "SIGKILL");
  return printed;
}

const train = (options, killAt) => run("node train.mjs", options, killAt);

/** Run commands and return how often they opened each photo. */
function countOpened(...command) {
  const options = { cwd: folder, env, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] };
  return JSON.parse(execFileSync("python", [join(ROOT, "js/test/opened.py"), "photos", ...command], options));
}

test("python workers open each photo once, and 32 epochs of training need no photo", async () => {
  const counts = countOpened("sh", "-c", line("penstock produce"));
  assert.equal(Object.keys(counts).length, photos.length);
  assert.deepEqual([...new Set(Object.values(counts))], [1]);
  renameSync(join(folder, "photos"), join(folder, "away"));

  const whole = await train("--checkpoint whole --every 7");
  assert.equal(whole.filter((text) => text.startsWith("epoch ")).length, 32);
  const [accuracy, weights, memory] = whole.slice(-3);
  assert.ok(Number(accuracy.match(/held-out photos ([\d.]+)/)[1]) >= 0.95, accuracy);
  assert.ok(Number(memory.match(/peak memory (\d+) MB/)[1]) < MOST_MB, memory);

  const killed = await train("--checkpoint killed --every 7", "epoch 9:");
  const after = await train("--checkpoint killed --every 7");
  const step = Number(after[0].match(/^goes on after step (\d+)$/)[1]);
  assert.ok(step >= 7 && step < Number(weights.match(/after (\d+) steps/)[1]));
  assert.equal(killed[0], after[1]);
  assert.equal(after.at(-2), weights);
  renameSync(join(folder, "away"), join(folder, "photos"));
});

test("a Node producer opens each photo once, and one that was killed goes on where it stood", async () => {
  await peer.close();
  peer = await startPeer();
  env.PENSTOCK_URL = peer.url;
  await run("node produce.mjs", "--shard 20", "photos.train: 60");
  const counts = countOpened(process.execPath, "produce.mjs", "--shard", "20");
  assert.ok(Object.keys(counts).length < photos.length - 60); // not again what was committed
  assert.deepEqual([...new Set(Object.values(counts))], [1]);
  for (const part of ["photos.train", "photos.val"]) {
    const [code, said] = await peer.ask("audit", { stream: part });
    assert.equal(code, 0, said);
  }
  const ofNode = await train("--checkpoint node");
  assert.match(ofNode[0], /^\d+ photos of 128 x 128, 4 classes$/);
  assert.ok(Number(ofNode.at(-3).match(/held-out photos ([\d.]+)/)[1]) >= 0.95);
});
