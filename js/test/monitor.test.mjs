// `penstock monitor --web` shows in Chromium what the terminal shows, and the newest samples as pictures.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { noChromium, startChromium } from "./chromium.mjs";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

let child;
let url;
let chromium;

before(async () => {
  if (noChromium) return;
  const env = { ...process.env, PYTHONPATH: "common:producer:consumer:front" };
  child = spawn(".venv/bin/python", ["js/test/monitor.py"], { cwd: ROOT, env, stdio: ["pipe", "pipe", "inherit"] });
  const { value } = await createInterface({ input: child.stdout })[Symbol.asyncIterator]().next();
  ({ url } = JSON.parse(value));
  chromium = await startChromium();
});

after(async () => {
  if (noChromium) return;
  await chromium.close();
  child.stdin.end();
  await new Promise((resolve) => child.once("exit", resolve));
});

for (const colorScheme of ["light", "dark"]) {
  test(`the page in ${colorScheme} shows rates, members, the verdict and pictures`, { skip: noChromium }, async () => {
    const page = await chromium.open(url, { colorScheme, viewport: { width: 1200, height: 900 } });
    await page.waitForSelector("canvas");
    await page.waitForFunction(() => /samples/.test(document.querySelector("tbody")?.textContent ?? ""));
    await page.waitForFunction(() => /[1-9]/.test(document.querySelector(".tile .value").textContent));
    const text = await page.evaluate(() => document.body.textContent);
    for (const word of ["shapes", "resnet", "gpu-0", "held", "workers", "live"]) assert.ok(text.includes(word), word);
    assert.ok((await page.evaluate(() => document.querySelector(".verdict").textContent)).length > 20);
    assert.equal(await page.evaluate(() => document.querySelectorAll("canvas").length), 12);
    const colours = await page.evaluate(() => {
      const canvas = document.querySelector("canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(Array.from({ length: data.length / 4 }, (_, at) => data.slice(4 * at, 4 * at + 4).join())).size;
    });
    assert.ok(colours > 1, "a picture, and no blank square");
    assert.equal(await page.evaluate(() => document.querySelectorAll("figure b b").length), 0, "labels are text");
    const { SCREENSHOTS } = process.env;
    if (SCREENSHOTS) await page.screenshot({ path: `${SCREENSHOTS}/monitor-${colorScheme}.png`, fullPage: true });
    await page.close();
  });
}

test("without the token nothing is shown, and no method writes", { skip: noChromium }, async () => {
  const [address, token] = url.split("#");
  const page = await chromium.open(`${address}#wrong`);
  await page.waitForFunction(() => /valid token/.test(document.getElementById("state").textContent));
  assert.equal(await page.evaluate(() => document.getElementById("streams").childElementCount), 0);
  await page.close();
  for (const path of ["v1/streams", "v1/streams/shapes/samples"]) {
    assert.equal((await fetch(address + path)).status, 401);
    const headers = { Authorization: `Bearer ${token}` };
    assert.equal((await fetch(address + path, { headers })).status, 200);
    assert.equal((await fetch(address + path, { method: "POST", headers })).status, 405);
  }
  const headers = { Authorization: `Bearer ${token}` };
  assert.equal((await fetch(`${address}v1/streams/other/samples`, { headers })).status, 404);
});
