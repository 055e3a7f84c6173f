// A tab of a browser is a member of a group, beside members in Python, whatever is closed or killed.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { noChromium, serveFolder, startChromium } from "./chromium.mjs";
import { startGateway } from "./gateways.mjs";
import { all, killAll, names, startMember } from "./members.mjs";
import { startPeer } from "./peer.mjs";

const SIZES = [60, 60];

let peer;
let site;
let chromium;

before(async () => {
  if (noChromium) return;
  peer = await startPeer();
  site = await serveFolder(fileURLToPath(new URL("..", import.meta.url)));
  chromium = await startChromium();
});

after(async () => {
  if (noChromium) return;
  await killAll();
  await chromium.close();
  await site.close();
  await peer.close();
});

/** Open a tab that trains on the group's batches, and stands still after so many steps. */
async function openTab(gateway, steps) {
  const options = encodeURIComponent(JSON.stringify({ ...gateway, steps }));
  const page = await chromium.open(`${site.url}test/pages/gateway.html#${options}`);
  return {
    page,
    until: (title) => page.waitForFunction((wanted) => document.title === wanted, title),
    holds: () => page.waitForFunction(() => window.received.length > window.acknowledged.length),
    received: async () => names([await page.evaluate(() => window.received)]),
    acknowledged: async () => names([await page.evaluate(() => window.acknowledged)]),
  };
}

/** Write an epoch, and start a gateway, and members in Python that read it slowly. `start` starts a quick one. */
async function withGroup(use, { members: count = 2, lease = "30" } = {}) {
  await peer.ask("produce", { stream: "train", spec: "numbers", sizes: SIZES, block_bytes: 64 });
  const gateway = await startGateway(peer.url, "--lease", lease);
  const options = {
    stream: "train",
    url: peer.url,
    group: "g",
    batch_size: 4,
    prefetch_bytes: 64,
    lease_s: Number(lease),
  };
  const start = (member, pause = 0) => startMember("python", { ...options, member, pause_s: pause });
  try {
    const members = Array.from({ length: count }, (_, at) => start(`p${at}`, 0.25));
    await Promise.all(members.map((member) => member.until((one) => one.given.length > 0)));
    await use({ url: gateway.url, token: gateway.token }, members, { kill: () => gateway.kill(), start });
  } finally {
    await killAll();
    await gateway.end();
    await peer.ask("remove", { stream: "train", url: peer.url });
  }
}

const given = (members) => members.flatMap((member) => names(member.given));

/** Let a further member take what the others have left, until every sample was given to someone. */
async function finish(seen, start) {
  const late = [start("late")];
  const told = () => [...seen(), ...given(late)];
  while (new Set(told()).size < 120) {
    await sleep(20);
    if (late.at(-1).child.exitCode !== null) late.push(start(`late-${late.length}`));
  }
  return told();
}

test("a tab trains alone on a whole epoch", { skip: noChromium }, () =>
  withGroup(
    async (gateway) => {
      const tab = await openTab(gateway, 1000);
      await tab.until("trained");
      assert.deepEqual((await tab.acknowledged()).sort(), all(SIZES).sort());
      await tab.page.close();
    },
    { members: 0 },
  ),
);

test("the batches of a tab that is closed in the middle go to the members in Python", { skip: noChromium }, () =>
  withGroup(async (gateway, members, { start }) => {
    const tab = await openTab(gateway, 3);
    await tab.until("in the middle");
    await tab.holds();
    const acknowledged = await tab.acknowledged();
    const held = (await tab.received()).filter((one) => !acknowledged.includes(one));
    assert.ok(acknowledged.length >= 8 && held.length > 0, `${acknowledged.length} acknowledged, ${held.length} held`);
    await tab.page.close();
    const seen = await finish(() => [...acknowledged, ...given(members)], start);
    assert.deepEqual([...new Set(seen)].sort(), all(SIZES).sort());
    assert.equal(given(members).filter((one) => acknowledged.includes(one)).length, 0, "nothing twice");
  }),
);

test("a member in Python is killed beside a tab, and nothing is lost", { skip: noChromium }, () =>
  withGroup(
    async (gateway, members, { start }) => {
      const tab = await openTab(gateway, 1000);
      await tab.page.waitForFunction(() => window.received.length > 0);
      await members[0].kill();
      await tab.until("trained");
      const acknowledged = await tab.acknowledged();
      await tab.page.close();
      const told = () => [...acknowledged, ...names(members[0].acknowledged), ...given(members.slice(1))];
      const seen = await finish(() => [...told(), ...given(members)], start);
      assert.deepEqual([...new Set(seen)].sort(), all(SIZES).sort());
    },
    { lease: "3" },
  ),
);

test("the gateway is killed beside a tab, and nothing is lost", { skip: noChromium }, () =>
  withGroup(
    async (gateway, members, { kill, start }) => {
      const tab = await openTab(gateway, 3);
      await tab.until("in the middle");
      const acknowledged = await tab.acknowledged();
      await kill();
      const seen = await finish(() => [...acknowledged, ...given(members)], start);
      await tab.page.close();
      assert.deepEqual([...new Set(seen)].sort(), all(SIZES).sort());
    },
    { lease: "3" },
  ),
);

test("a page that was blocked for longer than its timeoutMs takes what came meanwhile", { skip: noChromium }, () =>
  withGroup(
    async (gateway) => {
      const page = await chromium.open(`${site.url}package.json`);
      const waits = page.waitForEvent("console", (message) => message.text() === "waits");
      const waiting = page.evaluate(async (options) => {
        const { load } = await import("/dist/browser.js");
        const loader = load("train", { ...options, group: "g", batchSize: 4, timeoutMs: 1500 });
        const read = async () => {
          let samples = 0;
          for await (const { size } of loader) samples += size;
          return samples;
        };
        await read();
        const next = read();
        console.log("waits");
        await new Promise((resolve) => setTimeout(resolve, 50));
        for (const until = performance.now() + 8000; performance.now() < until; );
        const samples = await next;
        await loader.close();
        return samples;
      }, gateway);
      await waits;
      await sleep(4500); // the gateway says what it waits for, and the batches come behind that
      await peer.ask("produce", { stream: "train", spec: "numbers", sizes: SIZES, block_bytes: 64 });
      assert.equal(await waiting, 120);
      await page.close();
    },
    { members: 0 },
  ),
);

test("a page of a foreign origin is told why it may not read", { skip: noChromium }, () =>
  withGroup(
    async ({ url }) => {
      const page = await chromium.open(`${site.url.replace("127.0.0.1", "foreign.localhost")}package.json`);
      const closed = await page.evaluate(
        (address) =>
          new Promise((resolve) => {
            const socket = new WebSocket(`${address}/v1/read`);
            socket.onclose = ({ code, reason }) => resolve({ code, reason });
          }),
        url,
      );
      await page.close();
      assert.equal(closed.code, 4403);
      assert.match(closed.reason, /--origin/);
    },
    { members: 0 },
  ),
);
