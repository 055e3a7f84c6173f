// What docs/javascript.md shows runs, and prints what its comments say.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { startPeer } from "./peer.mjs";

const PAGE = readFileSync(new URL("../../docs/javascript.md", import.meta.url), "utf8");
const PACKAGE = fileURLToPath(new URL("..", import.meta.url));

let peer;

before(async () => {
  peer = await startPeer();
  await peer.ask("produce", { stream: "train", spec: "fixed", sizes: [60, 40] });
});

after(() => peer.close());

for (const [index, [, code]] of [...PAGE.matchAll(/^```js\n(.*?)^```/gms)].entries()) {
  test(`block ${index} prints what its comments say`, () => {
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
