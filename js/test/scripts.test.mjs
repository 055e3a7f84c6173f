// The server runs the same scripts for both languages: an update of one alone would break groups of mixed members.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { loadScript } from "../dist/scripts.js";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const SCRIPTS = new URL("../dist/scripts/", import.meta.url);
const PYTHON = `
import json
from importlib.resources import files
from penstock_common.server import scripts
names = [path.name.removesuffix(".lua") for path in files(scripts).iterdir() if path.name.endswith(".lua")]
print(json.dumps({name: scripts.load_script(name) for name in names}))
`;

test("Node sends the scripts that Python sends, to the byte", () => {
  const options = { cwd: ROOT, env: { ...process.env, PYTHONPATH: "common" }, encoding: "utf8" };
  const python = JSON.parse(execFileSync(".venv/bin/python", ["-c", PYTHON], options));
  const names = readdirSync(SCRIPTS).map((file) => file.replace(/\.lua$/, ""));
  assert.ok(names.length > 40);
  assert.deepEqual(names.sort(), Object.keys(python).sort());
  for (const name of names) assert.equal(loadScript(name), python[name], name);
});

for (const name of ["nothing", "../errors", "commit.lua"]) {
  test(`${name} is no script`, () => {
    assert.throws(() => loadScript(name), RangeError);
  });
}
