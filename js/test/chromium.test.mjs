// The driver of the tests of pages: what a page does is seen, and what goes wrong in it is not lost.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { noChromium, serveFolder, startChromium } from "./chromium.mjs";

const PAGE = `<script type="module">
  const worker = new Worker("worker.mjs", { type: "module" });
  worker.onmessage = ({ data }) => { document.title = data; };
</script>`;
const folder = mkdtempSync(join(tmpdir(), "penstock-page-"));

let site;

before(async () => {
  mkdirSync(join(folder, "inner"));
  writeFileSync(join(folder, "inner/index.html"), PAGE);
  writeFileSync(join(folder, "inner/worker.mjs"), 'postMessage("from a worker");');
  writeFileSync(join(folder, "broken.html"), "<script>throw new Error('what went wrong')</script>");
  site = await serveFolder(folder);
});

after(async () => {
  await site.close();
  rmSync(folder, { recursive: true });
});

test("a page and its worker run", { skip: noChromium }, async () => {
  const chromium = await startChromium();
  const page = await chromium.open(`${site.url}inner/`);
  await page.waitForFunction(() => document.title === "from a worker");
  await chromium.close();
});

test("an error that a page does not catch fails the test", { skip: noChromium }, async () => {
  const chromium = await startChromium();
  await chromium.open(`${site.url}broken.html`);
  await assert.rejects(chromium.close(), /what went wrong/);
});

test("only files of the folder are served", async () => {
  const answers = ["broken.html", "absent.html", "..%2F..%2Fetc%2Fpasswd"].map((path) => fetch(site.url + path));
  assert.deepEqual(
    (await Promise.all(answers)).map(({ status }) => status),
    [200, 404, 404],
  );
});

test("a host without Chromium skips by a sentence, and CI fails", () => {
  const env = { PATH: folder };
  const script = 'import("./chromium.mjs").then(({ noChromium }) => console.log(noChromium))';
  const run = (more) =>
    execFileSync(process.execPath, ["-e", script], {
      cwd: fileURLToPath(new URL(".", import.meta.url)),
      env: { ...env, ...more },
      encoding: "utf8",
      stdio: "pipe",
    });
  assert.match(run({}), /^needs Chromium: install it/);
  assert.throws(() => run({ CI: "true" }), /needs Chromium/);
  assert.match(run({ CI: "true", CHROME_BIN: "/opt/chrome" }), /^false/);
});
