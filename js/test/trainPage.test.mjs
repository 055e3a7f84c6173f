// The page of tensorflow-js.md as it stands, in Chromium: it trains on a stream through a gateway, and acknowledges it all.
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { noChromium, serveFolder, startChromium } from "./chromium.mjs";
import { startGateway } from "./gateways.mjs";
import { startPeer } from "./peer.mjs";

const PACKAGE = fileURLToPath(new URL("..", import.meta.url));
const TOKEN = "t".repeat(43);

test("the page that trains does what it says", { skip: noChromium }, async () => {
  const page = readFileSync(new URL("../../docs/tensorflow-js.md", import.meta.url), "utf8");
  const [, html] = /^```html\n(.*?)^```/ms.exec(page);
  const folder = mkdtempSync(join(tmpdir(), "penstock-train-"));
  writeFileSync(join(folder, "tokens.txt"), `digits.train/page ${TOKEN}\n`, { mode: 0o600 });
  mkdirSync(join(folder, "site/node_modules/penstock-js"), { recursive: true });
  symlinkSync(join(PACKAGE, "dist"), join(folder, "site/node_modules/penstock-js/dist"));
  symlinkSync(join(PACKAGE, "node_modules/@tensorflow"), join(folder, "site/node_modules/@tensorflow"));
  const peer = await startPeer();
  await peer.ask("digits");
  const gateway = await startGateway(peer.url, "--tokens", join(folder, "tokens.txt"));
  writeFileSync(join(folder, "site/train.html"), html.replace("ws://localhost:8466", gateway.url));
  const site = await serveFolder(join(folder, "site"));
  const chromium = await startChromium();
  try {
    const tab = await chromium.open(`${site.url}train.html#${TOKEN}`);
    await tab.waitForFunction(() => document.title !== "trains");
    assert.match(await tab.title(), /^the loss is \d\.\d+$/);
    const [code, said] = await peer.ask("audit", { stream: "digits.train" });
    assert.equal(code, 0, said);
    assert.match(said, / page +1437/);
  } finally {
    await chromium.close();
    await site.close();
    await gateway.end();
    await peer.close();
    rmSync(folder, { recursive: true });
  }
});
