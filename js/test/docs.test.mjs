// What the pages on JavaScript show runs, and prints what its comments say.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { startPeer } from "./peer.mjs";

const PAGES = ["javascript", "javascript-groups", "javascript-wire", "tensorflow-js", "coming-from-process-send"];
const PACKAGE = fileURLToPath(new URL("..", import.meta.url));

let peer;

before(async () => {
  peer = await startPeer();
  await peer.ask("produce", { stream: "train", spec: "fixed", sizes: [60, 40] });
  await peer.ask("digits");
  await peer.ask("produce_files");
});

after(() => peer.close());

const blocks = PAGES.flatMap((page) => {
  const text = readFileSync(new URL(`../../docs/${page}.md`, import.meta.url), "utf8");
  return [...text.matchAll(/^```js\n(.*?)^```/gms)].map(([, code], index) => [`block ${index} of ${page}.md`, code]);
});

for (const [name, code] of blocks) {
  test(`${name} prints what its comments say`, () => {
    const printed = execFileSync(process.execPath, ["--input-type=module", "--eval", code], {
      cwd: PACKAGE,
      encoding: "utf8",
      env: { ...process.env, PENSTOCK_URL: peer.url },
    });
    const said = [...code.matchAll(/^ *console\.log\(.*; \/\/ (.*)$/gm)].map(([, text]) => text);
    assert.notEqual(said.length, 0);
    assert.deepEqual(printed.trimEnd().split("\n"), said);
  });
}
