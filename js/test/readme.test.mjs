// The README's section on Node, typed by a user with a fresh clone.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const SECTION = readFileSync(join(ROOT, "README.md"), "utf8").split("## From Node")[1].split("\n## ")[0];
const SCRIPTS = "common/penstock_common/server/scripts";
const clone = mkdtempSync(join(tmpdir(), "penstock-clone-"));
const bin = join(clone, "bin");
const env = {
  ...process.env,
  XDG_RUNTIME_DIR: join(clone, "run"),
  PATH: [bin, join(ROOT, ".venv/bin"), process.env.PATH].join(delimiter),
  PYTHONPATH: ["common", "producer", "consumer", "front"].map((folder) => join(ROOT, folder)).join(delimiter),
  npm_config_prefer_offline: "true",
};
delete env.PENSTOCK_URL;
const shell = (script) => execFileSync("sh", ["-euc", script], { cwd: clone, env, encoding: "utf8" });

let server;

before(async () => {
  mkdirSync(env.XDG_RUNTIME_DIR, { mode: 0o700 });
  mkdirSync(bin);
  const npm = join(process.execPath, "../../lib/node_modules/npm/bin/npm-cli.js");
  writeFileSync(join(bin, "npm"), `#!/bin/sh\nexec "${process.execPath}" "${npm}" "$@"\n`, { mode: 0o755 });
  writeFileSync(join(bin, "node"), `#!/bin/sh\nexec "${process.execPath}" "$@"\n`, { mode: 0o755 });
  const isTracked = (path) => !/\/(node_modules|dist)(\/|$)/.test(path);
  for (const part of ["js", SCRIPTS])
    cpSync(join(ROOT, part), join(clone, part), { recursive: true, filter: isTracked });
  server = spawn("penstock", ["server", "--port", "0"], { env, stdio: ["ignore", "pipe", "inherit"] });
  await once(createInterface({ input: server.stdout }), "line");
  shell(`python ${ROOT}/examples/tfjs/photos.py photos --gigabytes 0.001 --side 100`);
  const [produce] = readFileSync(join(ROOT, "README.md"), "utf8").match(/^penstock produce images [^#\n]*/m);
  shell(`${produce.replace("--transform augment:flip", "").replace("--no-workers", "--workers 1")} 2> produced.txt`);
});

after(async () => {
  server.kill("SIGINT");
  await once(server, "exit");
  rmSync(clone, { recursive: true, force: true });
});

test("the commands as they stand print the batches of the stream", () => {
  const [, path, script] = SECTION.match(/^```js (\S+)\n(.*?)^```/ms);
  mkdirSync(join(clone, path, ".."));
  writeFileSync(join(clone, path), script);
  const [, commands] = SECTION.match(/^```sh\n(.*?)^```/ms);
  const batches = shell(commands)
    .split("\n")
    .filter((line) => /^\d+ Uint8Array [0-3]n$/.test(line));
  assert.equal(batches.reduce((sum, line) => sum + Number.parseInt(line, 10), 0) > 16, true, commands);
});
