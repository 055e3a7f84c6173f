// What the living promise when members, connections and servers die: nothing is lost, and only what was not acknowledged
// comes again.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { createClient } from "@redis/client";
import { Member } from "../dist/group/member.js";
import { SharedReading } from "../dist/group/reading.js";
import { whetherProducerRuns } from "../dist/group/sentences.js";
import { SharedReaders } from "../dist/group/sharedReader.js";
import { GroupNotFound, load, MemberReplaced, openWriter, ServerUnavailable, WaitTimeout } from "../dist/index.js";
import { BlockingConnection } from "../dist/stream/blockingConnection.js";
import { all, killAll, names, repeated, slotState, startMember } from "./members.mjs";
import { startPeer } from "./peer.mjs";

/** Acknowledgements of a Python member that may be under way. */
const UNDER_WAY = 8;
const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));
let peer;
let client;

before(async () => {
  peer = await startPeer();
  client = createClient({ url: peer.url });
  await client.connect();
});

after(async () => {
  client.destroy();
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

const loaders = [];

/** A loader that is closed after the test. */
function begin(stream, options = {}) {
  const loader = load(stream, { group: "g", batchSize: 5, url: peer.url, notify: () => {}, ...options });
  loaders.push(loader);
  return loader;
}

afterEach(async () => {
  await killAll();
  for (const loader of loaders.splice(0)) await loader.close();
});

async function collect(loader) {
  const found = [];
  for await (const batch of loader) found.push([...batch.identities()]);
  return found;
}

const isClean = async (stream, url = peer.url) => {
  const [code, said] = await peer.ask("audit", { stream, url });
  assert.equal(code, 0, said);
};

const SIZES = [200, 200];
const PRODUCED = { spec: "fixed", sizes: SIZES, block_bytes: 250, partitions: 2 };

/** Two members of one group, of which each has been given something. */
async function startTwo(stream, [one, other], options = {}) {
  await peer.ask("produce", { stream, ...PRODUCED, epochs: 0 });
  const given = { stream, group: "g", batch_size: 5, url: peer.url, ...options };
  const both = [startMember(one, { ...given, member: "a" }), startMember(other, { ...given, member: "b" })];
  await Promise.all(both.map((member) => member.until(({ isJoined }) => isJoined))); // a slow start misses nothing
  await peer.ask("produce", { stream, ...PRODUCED });
  await Promise.all(both.map((member) => member.until(({ acknowledged }) => acknowledged.length >= 3)));
  return both;
}

for (const languages of [
  ["node", "node"],
  ["node", "python"],
]) {
  test(`${languages.join(" and ")} share an epoch, and each sample comes once`, async () => {
    const stream = `shared-${languages.join("-")}`;
    const [one, other] = await startTwo(stream, languages, { pause_s: 0.02 });
    await Promise.all([one.ended, other.ended]);
    assert.ok(one.hasLeft && other.hasLeft, one.said + other.said);
    assert.deepEqual(names([...one.given, ...other.given]).sort(), all(SIZES).sort());
    await isClean(stream);
  });
}

for (const [victimIs, survivorIs] of [
  ["node", "node"],
  ["node", "python"],
  ["python", "node"],
]) {
  test(`a ${survivorIs} member takes over what a killed ${victimIs} member had not acknowledged`, async () => {
    const stream = `killed-${victimIs}-${survivorIs}`;
    const [victim, survivor] = await startTwo(stream, [victimIs, survivorIs], { lease_s: 30 });
    await victim.kill();
    await survivor.ended;
    assert.ok(survivor.hasLeft, survivor.said);
    const given = [...victim.given, ...survivor.given];
    assert.deepEqual([...new Set(names(given))].sort(), all(SIZES).sort());
    const underWay = victimIs === "python" ? UNDER_WAY : 0;
    const open = names(victim.given.slice(Math.max(0, victim.acknowledged.length - underWay)));
    assert.deepEqual(
      repeated(names(given)).filter((name) => !open.includes(name)),
      [],
    );
    assert.match(survivor.said, /member 'a' has ended on this host: its \d+ entries are handed out again/);
    await isClean(stream);
  });

  test(`a stopped ${victimIs} member is fenced by a ${survivorIs} member that took over`, async () => {
    const stream = `stopped-${victimIs}-${survivorIs}`;
    const [zombie, survivor] = await startTwo(stream, [victimIs, survivorIs], { lease_s: 1 });
    zombie.child.kill("SIGSTOP");
    await survivor.ended;
    assert.ok(survivor.hasLeft, survivor.said);
    const [before] = [names([...zombie.given, ...survivor.given])];
    assert.deepEqual([...new Set(before)].sort(), all(SIZES).sort()); // without it
    const inHand = zombie.given.length;
    zombie.child.kill("SIGCONT");
    await zombie.ended;
    // what it had read ahead is another's now; the signal may come between the last check of a batch and its line
    assert.ok(zombie.given.length - inHand <= 1, JSON.stringify(zombie.given.slice(inHand)));
    const open = names(zombie.given.slice(Math.max(0, zombie.acknowledged.length - 1 - UNDER_WAY)));
    assert.deepEqual(
      repeated(before).filter((name) => !open.includes(name)),
      [],
    );
    await isClean(stream);
  });
}

test("an answer that waited for longer than a lease is handed out by another member only", async () => {
  await peer.ask("produce", { stream: "late", spec: "fixed", sizes: [200], block_bytes: 250 });
  const { call } = BlockingConnection.prototype;
  const given = [];
  let [calls, before] = [0, 0];
  let taken;
  BlockingConnection.prototype.call = async function (...command) {
    calls += 1;
    const isThird = calls === 3;
    const answer = await call.apply(this, command);
    if (isThird) {
      taken = await peer.ask("take_over", { url: peer.url, stream: "late", after_s: 1.6 });
      before = given.length;
    }
    return answer;
  };
  const loader = begin("late", { leaseMs: 4000, prefetchBytes: 1000, timeoutMs: 2500 });
  try {
    const all = (async () => {
      for await (const batch of loader) given.push([...batch.identities()]);
    })();
    await assert.rejects(all, WaitTimeout); // the other member holds the rest
  } finally {
    BlockingConnection.prototype.call = call;
  }
  assert.ok(taken.length > 0);
  assert.deepEqual(
    names(given.slice(before)).filter((name) => taken.includes(Number(name.split("/").at(-1)))),
    [],
  );
});

test("a member that was out of its lease acknowledges nothing of what another one took", async () => {
  await peer.ask("produce", { stream: "fenced", spec: "fixed", sizes: [20], block_bytes: 5000 });
  const said = [];
  const slow = begin("fenced", { acknowledge: "manual", leaseMs: 60_000, notify: (line) => said.push(line) });
  const batches = slow[Symbol.asyncIterator]();
  const { value: held } = await batches.next();
  const [roster] = await client.keys("penstock:{fenced.*}:roster");
  const key = (rest) => roster.replace("roster", `0:${rest}`);
  const [{ id }] = await client.xPendingRange(key("entries"), "g", "-", "+", 1);
  await client.xClaim(key("entries"), "g", "another", 0, id);
  while (said.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
  assert.match(said[0], /lost 1 entries of epoch 0: .* another member hands them out$/);
  assert.equal(await held.ack(), false);
  assert.equal(await client.bitCount(key("ledger:g:0")), 0);
  assert.equal((await client.xPendingRange(key("entries"), "g", "-", "+", 1)).length, 1);
});

test("a batch whose lease was not renewed in time is given by the next loop", async () => {
  const [stream, sizes] = ["unsure", [40]];
  await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 100 });
  const loader = begin(stream, { acknowledge: "manual", leaseMs: 500, timeoutMs: 2000 });
  const found = [];
  const take = async (batch) => {
    found.push([...batch.identities()]);
    await batch.ack();
  };
  await take((await loader[Symbol.asyncIterator]().next()).value);
  const [entries] = await client.keys(`penstock:{${stream}.*}:0:entries`);
  while ((await client.xPending(entries, "g")).pending + 1 < (await client.xLen(entries)))
    await new Promise((resolve) => setTimeout(resolve, 20)); // the rest is read ahead
  await client.sendCommand(["CLIENT", "PAUSE", "4000"]);
  await new Promise((resolve) => setTimeout(resolve, 1000)); // the lease ends
  await assert.rejects(loader[Symbol.asyncIterator]().next(), WaitTimeout);
  await client.ping(); // the pause is over
  for await (const batch of loader) await take(batch);
  assert.deepEqual(names(found).sort(), all(sizes).sort());
  await isClean(stream);
});

test("a member renews what it holds while its step takes longer than its lease", async () => {
  const stream = "slow";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [60], block_bytes: 100 });
  const given = { stream, group: "g", batch_size: 5, url: peer.url, lease_s: 0.3, prefetchBytes: 100 };
  const slow = startMember("node", { ...given, member: "slow", pause_s: 1.5 });
  await slow.until(({ given }) => given.length > 0);
  const found = [];
  for await (const batch of begin(stream, { leaseMs: 300 })) {
    found.push([...batch.identities()]);
    await new Promise((resolve) => setTimeout(resolve, 200)); // time to see a lease that lapses
  }
  await slow.ended;
  assert.ok(slow.hasLeft, slow.said);
  assert.deepEqual(names([...found, ...slow.given]).sort(), all([60]).sort());
  await isClean(stream);
});

test("a member that comes back under its name goes on with what it was given", async () => {
  const stream = "again";
  const [first, other] = await startTwo(stream, ["node", "node"], { lease_s: 600 });
  await first.kill();
  await other.kill();
  const again = begin(stream, { member: "a", leaseMs: 600_000 });
  const beside = begin(stream, { member: "b", leaseMs: 600_000 });
  const found = (await Promise.all([collect(again), collect(beside)])).flat();
  const acknowledged = [...first.acknowledged, ...other.acknowledged];
  assert.deepEqual(names([...acknowledged, ...found]).sort(), all(SIZES).sort());
});

test("who ends an entry says also what another member had acknowledged of it, which a failover may have lost", async () => {
  const stream = "parts";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [50], block_bytes: 500 });
  const first = begin(stream, { member: "a", acknowledge: "manual" });
  const batch = (await first[Symbol.asyncIterator]().next()).value;
  await batch.ack();
  await first.close();
  const [ledger] = await client.keys(`penstock:{${stream}.*}:0:ledger:g:0`);
  const found = [];
  for await (const batch of begin(stream, { member: "b" })) {
    if (found.length === 0) await client.del(ledger); // nothing of this member is there yet
    found.push([...batch.identities()]);
  }
  assert.equal(names(found).length, 45);
  await isClean(stream);
});

test("of two loaders with one name the older one stops", async () => {
  await peer.ask("produce", { stream: "names", spec: "fixed", sizes: [50], block_bytes: 100 });
  const older = begin("names", { member: "m", leaseMs: 300 });
  const loop = older[Symbol.asyncIterator]();
  await loop.next();
  await begin("names", { member: "m", leaseMs: 300 }).open();
  await assert.rejects(async () => {
    while (!(await loop.next()).done) await new Promise((resolve) => setTimeout(resolve, 20));
  }, MemberReplaced);
});

test("a member whose group is dropped says so", async () => {
  await peer.ask("produce", { stream: "dropped", spec: "fixed", sizes: [500], block_bytes: 100, partitions: 2 });
  const loop = begin("dropped", { leaseMs: 300 })[Symbol.asyncIterator]();
  await loop.next();
  const rosters = await client.keys("penstock:{dropped.*}:roster");
  for (const roster of rosters) await client.hDel(roster, await ofGroup(roster));
  await assert.rejects(async () => {
    while (!(await loop.next()).done) await new Promise((resolve) => setTimeout(resolve, 20));
  }, GroupNotFound);
  for (const roster of rosters) assert.deepEqual(await ofGroup(roster), []); // its member does not bring it back
});

/** The fields of the group and its members on a roster. */
const ofGroup = async (roster) => (await client.hKeys(roster)).filter((name) => /^[gm]:g\b/.test(name));

test("a member that one roster has lost joins again, and is given everything", async () => {
  const [stream, sizes] = ["forgotten", [40, 40]];
  await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 250, partitions: 2 });
  const [, tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  const restore = await slotState(client, `${stream}.${tag}`);
  const found = [];
  for await (const batch of begin(stream, { prefetchBytes: 400, leaseMs: 3000 })) {
    if (found.length === 0) await restore();
    found.push([...batch.identities()]);
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  assert.deepEqual([...new Set(names(found))].sort(), all(sizes).sort());
  assert.ok(repeated(names(found)).length <= 40, "only what the server forgot comes again");
  assert.equal(await client.hGet(`penstock:{${stream}.${tag}}:roster`, "d:g:0"), "1");
});

for (const isTaken of [false, true]) {
  const by = isTaken ? "another member may read them" : "they are read again in the same pass";
  test(`entries that a server no longer gave out are lost to nobody: ${by}`, async () => {
    const [stream, sizes, said] = [`older-${isTaken}`, [20, 20], []];
    await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 250, partitions: 2, epochs: 2 });
    const [loader, other] = [begin(stream, { notify: (line) => said.push(line) }), begin(stream, { member: "other" })];
    await Promise.all([loader.open(), other.open()]);
    const [, tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
    const restore = await slotState(client, `${stream}.${tag}`);
    const run = SharedReaders.prototype.run;
    let ended;
    SharedReaders.prototype.run = function () {
      SharedReaders.prototype.run = run;
      ended = run.call(this);
      return ended;
    };
    const loop = loader[Symbol.asyncIterator]();
    const found = [[...(await loop.next()).value.identities()]];
    await ended;
    await restore();
    while (!said.some((line) => line.includes("lost"))) await new Promise((resolve) => setTimeout(resolve, 10));
    const takeUp = SharedReading.prototype.takeUp;
    SharedReading.prototype.takeUp = async function (epoch) {
      await takeUp.call(this, epoch);
      SharedReading.prototype.takeUp = takeUp;
      if (isTaken) found.push(...(await collect(other)));
    };
    for await (const batch of { [Symbol.asyncIterator]: () => loop }) found.push([...batch.identities()]);
    assert.deepEqual([...new Set(names(found))].sort(), all(sizes).sort());
    assert.ok(repeated(names(found)).length <= 5, "only the batch in hand may come again");
    const [line] = said.filter((one) => one.includes("lost"));
    assert.match(line, /came back as it was before it gave them out, and gives them out again$/);
  });
}

test("a member that a roster loses again and again in one epoch joins again each time", async () => {
  const [stream, sizes] = ["twice-lost", [60, 60]];
  await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 250, partitions: 2 });
  const [, tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  const roster = `penstock:{${stream}.${tag}}:roster`;
  const restore = await slotState(client, `${stream}.${tag}`);
  const found = [];
  let losses = 0;
  for await (const batch of begin(stream, { prefetchBytes: 400, leaseMs: 3000 })) {
    if (losses < 3 && (await ofGroup(roster)).length > 0) {
      await restore();
      losses += 1;
    }
    found.push([...batch.identities()]);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  assert.equal(losses, 3);
  assert.deepEqual([...new Set(names(found))].sort(), all(sizes).sort());
});

test("a member waits for an epoch that one partition has lost, until its writer opens it there again", async () => {
  const [stream, sizes] = ["reopened", [20, 20]];
  await peer.ask("produce", { stream, spec: "fixed", sizes, partitions: 2, block_bytes: 250, epochs: 0 });
  const said = [];
  const loader = begin(stream, { leaseMs: 3000, notify: (line) => said.push(line) });
  await loader.open();
  const [, tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  const restore = await slotState(client, `${stream}.${tag}`);
  await peer.ask("plan", { stream, sizes, url: peer.url });
  await peer.ask("write_planned", { shard: 0, size: 20 });
  const found = [];
  for await (const batch of loader) {
    if (found.length === 0) {
      await restore();
      const until = Date.now() + 30_000;
      while (!said.some((line) => line.includes("without epoch 0 in partition 1")) && Date.now() < until) {
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
      await peer.ask("write_planned", { shard: 1, size: 20 });
      await peer.ask("end_planned");
    }
    found.push([...batch.identities()]);
  }
  assert.deepEqual(names(found).sort(), all(sizes).sort());
});

test("a group that the first roster has lost is joined, and not made", async () => {
  const [stream, sizes] = ["known", [20, 20]];
  await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 250, partitions: 2 });
  await begin(stream, { member: "before" }).open();
  const [tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  await client.hDel(`penstock:{${stream}.${tag}}:roster`, await ofGroup(`penstock:{${stream}.${tag}}:roster`));
  const loader = begin(stream, { create: false, leaseMs: 3000 });
  await loader.open();
  await assert.rejects(begin(stream, { group: "h", create: false }).open(), /no group 'h'; groups there: g/);
});

test("a member that waits for an epoch joins again where one roster has lost it", async () => {
  const stream = "waiting";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [20, 20], block_bytes: 250, partitions: 2 });
  const loader = begin(stream, { member: "m", leaseMs: 3000, timeoutMs: 20_000 });
  assert.equal(names(await collect(loader)).length, 40);
  const next = loader[Symbol.asyncIterator]().next();
  const [, tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  const roster = `penstock:{${stream}.${tag}}:roster`;
  await client.hDel(roster, await ofGroup(roster));
  await peer.ask("produce", { stream, spec: "fixed", sizes: [20, 20], block_bytes: 250, partitions: 2 });
  assert.equal((await next).value.epoch, 1);
  for (const until = Date.now() + 20_000; (await ofGroup(roster)).length < 2 && Date.now() < until; ) {
    await new Promise((resolve) => setTimeout(resolve, 50)); // its heartbeat joins again
  }
  assert.deepEqual((await ofGroup(roster)).sort(), ["g:g", "m:g:m"]);
});

test("what another member is given again behind a look at the end of an epoch is not missing", async () => {
  await peer.ask("produce", { stream: "given-again", spec: "fixed", sizes: [80], block_bytes: 250 });
  const [entries] = await client.keys("penstock:{given-again.*}:0:entries");
  const { closeEpochs, hasUnread } = Member.prototype;
  let isFirst = true;
  Member.prototype.closeEpochs = async function (epoch) {
    if (isFirst) {
      isFirst = false; // the server goes back to before it gave the epoch out
      await client.xGroupDestroy(entries, "g");
      await client.xGroupCreate(entries, "g", "0");
      await client.del(entries.replace("entries", "ledger:g:0"));
    }
    await closeEpochs.call(this, epoch);
    assert.deepEqual([...this.unclosed], [epoch]);
  };
  Member.prototype.hasUnread = async function (epoch) {
    Member.prototype.hasUnread = hasUnread;
    await client.xReadGroup("g", "other", { key: entries, id: ">" });
    return await hasUnread.call(this, epoch);
  };
  try {
    assert.equal((await collect(begin("given-again"))).flat().length, 80);
  } finally {
    Object.assign(Member.prototype, { closeEpochs, hasUnread });
  }
  assert.equal(isFirst, false);
});

test("an epoch that is released between finding and beginning it is passed", async () => {
  const stream = "passed";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 250, epochs: 2 });
  const find = Member.prototype.nextEpoch;
  Member.prototype.nextEpoch = async function (after) {
    const epoch = await find.call(this, after);
    Member.prototype.nextEpoch = find;
    assert.equal((await collect(begin(stream, { member: "other" }))).flat().length, 40);
    await peer.ask("release", { stream, epoch: 0, url: peer.url });
    return epoch;
  };
  try {
    assert.deepEqual(names(await collect(begin(stream, { member: "slow" }))).sort(), all([40], 1).sort());
  } finally {
    Member.prototype.nextEpoch = find;
  }
});

for (const [order, options] of Object.entries({ shared: {}, canonical: { rank: 0, worldSize: 1 } })) {
  test(`a manifest that no partition knows holds up no ${order} member`, async () => {
    const stream = `left-${order}`;
    await peer.ask("produce", { stream, spec: "fixed", sizes: [20, 20], epochs: 2, partitions: 2 });
    assert.equal(names(await collect(begin(stream, options))).length, 40);
    await loaders.pop().close();
    const restore = await slotState(client, stream);
    await peer.ask("release", { stream, epoch: 0, url: peer.url });
    await restore();
    const found = await collect(begin(stream, { ...options, timeoutMs: 10_000 }));
    assert.deepEqual(names(found).sort(), all([20, 20], 1).sort());
  });
}

test("connections that break again and again lose and repeat nothing", async () => {
  const stream = "broken";
  await peer.ask("produce", { stream, ...PRODUCED });
  const loader = begin(stream, { prefetchBytes: 2000 });
  const found = [];
  for await (const batch of loader) {
    found.push([...batch.identities()]);
    if (found.length % 8 === 0) await client.sendCommand(["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
  }
  assert.deepEqual(names(found).sort(), all(SIZES).sort());
  await loader.close();
  await isClean(stream);
});

test("a server that is killed and comes back is waited for, in words, and nothing is lost", async () => {
  const stream = "restarted";
  const directory = join(folder, "server");
  const [url, port] = await peer.ask("start_server", { directory });
  await peer.ask("produce", { stream, ...PRODUCED, url });
  const said = [];
  const loader = begin(stream, { url, prefetchBytes: 2000, notify: (line) => said.push(line) });
  const found = [];
  for await (const batch of loader) {
    found.push([...batch.identities()]);
    if (found.length !== 10) continue;
    await peer.ask("kill_server");
    const again = peer.ask("start_server", { directory, port });
    await again;
  }
  assert.deepEqual([...new Set(names(found))].sort(), all(SIZES).sort());
  assert.ok(repeated(names(found)).length <= 5 * UNDER_WAY); // acknowledgements that the server had not on its disk
  await loader.close();
  await isClean(stream, url);
  await peer.ask("kill_server");
});

test("a server that stands still is named within 5 s, and gone on with", async () => {
  const directory = join(folder, "still");
  const [url] = await peer.ask("start_server", { directory });
  await peer.ask("produce", { stream: "still", ...PRODUCED, url });
  const control = createClient({ url });
  await control.connect();
  const [, pid] = /process_id:(\d+)/.exec(await control.info("server"));
  control.destroy();
  const said = [];
  const loader = begin("still", { url, prefetchBytes: 2000, notify: (line) => said.push([Date.now(), line]) });
  const found = [];
  for await (const batch of loader) {
    found.push([...batch.identities()]);
    if (found.length !== 10) continue;
    process.kill(Number(pid), "SIGSTOP");
    const stopped = Date.now();
    setTimeout(() => process.kill(Number(pid), "SIGCONT"), 5500);
    while (said.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
    assert.match(said[0][1], /^waiting: no answer from redis:\/\/.*: is it stopped, overloaded or cut off\?$/);
    assert.doesNotMatch(said[0][1], /:[^/]+@/); // no password
    assert.ok(said[0][0] - stopped < 5000);
  }
  assert.deepEqual(names(found).sort(), all(SIZES).sort());
  await loader.close();
  await isClean("still", url);
  await peer.ask("kill_server");
});

/** Begin to read, and put the server back to what it had before this member joined. */
async function readOnOlderServer(stream, options, prepare) {
  const directory = join(folder, stream);
  const [url, port] = await peer.ask("start_server", { directory });
  await peer.ask("produce", { stream, ...PRODUCED, partitions: 1, url });
  await prepare(url);
  await peer.ask("kill_server");
  const older = `${directory}-before`;
  cpSync(directory, older, { recursive: true });
  await peer.ask("start_server", { directory, port });
  const loader = begin(stream, { url, prefetchBytes: 400, leaseMs: 3000, ...options });
  const loop = loader[Symbol.asyncIterator]();
  const first = await loop.next();
  await peer.ask("kill_server");
  await peer.ask("start_server", { directory: older, port });
  return { url, loader, loop, first: first.value };
}

for (const [order, options] of Object.entries({ shared: {}, canonical: { rank: 0, worldSize: 1 } })) {
  test(`a ${order} member that a server lost is told the server and the time`, async () => {
    const stream = `lost-${order}`;
    const { url, loader, loop } = await readOnOlderServer(stream, options, () => {});
    await assert.rejects(
      async () => {
        while (!(await loop.next()).done) await new Promise((resolve) => setTimeout(resolve, 50));
      },
      (error) => {
        assert.match(error.name, /^(GroupNotFound|EpochNotFound)$/);
        const where = url.replace(/\/\/.*@/, "//").replace(/\/$/, "");
        const told = `. The server ${where}, which has partition 0 of '${stream}', was restarted or replaced since`;
        assert.ok(error.message.includes(told), error.message);
        assert.match(error.message, /\(noticed at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\), and may have lost/);
        return true;
      },
    );
    await loader.close().catch(() => {}); // while there is a server that refuses what the older one does not know
    await peer.ask("kill_server");
  });

  test(`a ${order} member that a server lost joins its group again if that is still there`, async () => {
    const stream = `again-${order}`;
    const { url, loader, loop, first } = await readOnOlderServer(stream, options, async (url) => {
      const earlier = begin(stream, { url, ...options });
      await earlier.open();
      await earlier.close(); // from then on the group holds no data
    });
    const found = [[...first.identities()]];
    for await (const batch of { [Symbol.asyncIterator]: () => loop }) {
      found.push([...batch.identities()]);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    assert.deepEqual([...new Set(names(found))].sort(), all(SIZES).sort());
    await loader.close();
    await isClean(stream, url);
    await peer.ask("kill_server");
  });
}

test("why a loop waits is told without a server", async () => {
  const [url] = await peer.ask("start_server", { directory: join(folder, "why") });
  await peer.ask("open_shards", { stream: "why", url });
  const loader = begin("why", { url, batchSize: 2, timeoutMs: 5000 });
  await loader.open();
  await loader[Symbol.asyncIterator]().next();
  const waited = loader[Symbol.asyncIterator]().next();
  setTimeout(() => void peer.ask("kill_server"), 2500); // so that only the explanation fails before the wait's limit
  await assert.rejects(waited, (error) => {
    assert.ok(error instanceof WaitTimeout, error);
    assert.match(error.message, /^gave up after \d+ s: more samples of epoch 0 of 'why'; none came for/);
    return true;
  });
});

test("an epoch is to be closed only after a wait that no starting worker explains", () => {
  const asked = "Is a producer running (`penstock inspect t`)?";
  assert.equal(whetherProducerRuns("t", 0, 3000), `${asked} Its workers may still be starting`);
  assert.equal(whetherProducerRuns("t", 0, 20_000), `${asked} If none will: \`penstock epochs close t 0\``);
});

test("a member does not advise to close a feed that goes on", async () => {
  const writer = await openWriter("fed", { url: peer.url, spec: { x: ["float32", []] } });
  let isOver = false;
  const feeding = (async () => {
    while (!isOver) {
      await writer.write({ x: 1 });
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  })();
  const loader = begin("fed", { batchSize: 1000, timeoutMs: 3000 });
  await assert.rejects(loader[Symbol.asyncIterator]().next(), (error) => {
    assert.match(error.message, /: members of group 'g' were given what was committed in this time, and no batch is/);
    return true;
  });
  isOver = true;
  await feeding;
  await writer.close();
});

test("a server that is not there is waited for as long as patience lasts", async () => {
  const said = [];
  const loader = begin("nothing", { url: "redis://localhost:1", timeoutMs: 700, notify: (line) => said.push(line) });
  const asked = Date.now();
  await assert.rejects(loader.open(), ServerUnavailable);
  assert.ok(Date.now() - asked >= 600);
  assert.match(said[0], /^the connection broke while asking the server \(.*\); trying again for 1 s$/);
});
