// Masters that die, stand still or give slots away, and primaries that fail over, under a member and a writer in Node: all goes on, and nothing is lost.
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { DeliveryCheck } from "../dist/group/deliveryCheck.js";
import { Outboxes } from "../dist/group/outbox.js";
import { BadOption, load, openWriter, ServerUnavailable } from "../dist/index.js";
import { Server } from "../dist/server/client.js";
import { RunWatch } from "../dist/stream/serverRuns.js";
import { loadStream } from "../dist/stream/stream.js";
import { all, names } from "./members.mjs";
import { startPeer } from "./peer.mjs";
import { sampleOf } from "./samples.mjs";

const SPEC = { x: ["uint8", [1000]], y: ["int64", []] };
const SIZES = [60, 60, 60, 60, 60, 60];
const PARTITIONS = 3;
let peer;

before(async () => {
  peer = await startPeer();
});

after(async () => {
  await peer.close();
});

const loaders = [];

async function closeAll() {
  await Promise.all(loaders.splice(0).map((loader) => loader.close()));
}

afterEach(closeAll);

/**
 * Write an epoch in Node, and read it in Node meanwhile, in a shared and in an ordered group. `between` is called in the
 * middle of each shard, with the keys of the stream and of its partitions.
 *
 * @returns The identities of each group's batches, and what was said.
 */
async function pass(url, stream, between) {
  const said = [];
  const notify = (line) => said.push(line);
  const writer = await openWriter(stream, { url, spec: SPEC, blockBytes: 10_000, partitions: PARTITIONS, notify });
  const epoch = await writer.epoch(0, { sizes: SIZES });
  const keys = await peer.ask("keys_of", { stream, url });
  const [shared, ordered] = [[], []];
  const read = async (found, options) => {
    const loader = load(stream, { batchSize: 10, url, notify, prefetchBytes: 30_000, ...options });
    loaders.push(loader);
    for await (const batch of loader) found.push([...batch.identities()]);
  };
  const reading = Promise.all([read(shared, { group: "g" }), read(ordered, { group: "r", rank: 0, worldSize: 1 })]);
  reading.catch(() => {}); // the error is raised where it is awaited
  for (const [number, size] of SIZES.entries()) {
    const shard = await epoch.shard(number);
    while (shard.position < size) {
      if (shard.position === 30) await between(number, keys, shared);
      await shard.write(sampleOf(SPEC, 1000 * number + shard.position));
    }
    await shard.close();
  }
  await epoch.close();
  await writer.close();
  await reading;
  await closeAll();
  assert.deepEqual(names(ordered), all(SIZES));
  return { shared, said };
}

async function assertClean(stream, url) {
  const report = await peer.ask("audit_report", { stream, url });
  assert.deepEqual(report.findings, []);
  assert.equal(report.clean, true);
}

for (const fault of ["kill", "stop"]) {
  test(`a master is lost (${fault}) under a writer and members, and no sample is`, async () => {
    const [url] = await peer.ask("start_cluster", { replicas: 1 });
    let began;
    const { shared } = await pass(url, "lost", async (number, keys, given) => {
      if (number !== 2) return;
      while (given.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
      await peer.ask("lose_master", { key: keys[1 + number], fault });
      began = Date.now();
    });
    if (fault === "stop") assert.ok(Date.now() - began < 25_000, "it is waited for until another one has its slots");
    assert.deepEqual([...new Set(names(shared))].sort(), all(SIZES).sort());
    await assertClean("lost", url);
    await peer.ask("end_cluster");
  });
}

test("a slot that moves costs no sample, and one that is half moved is an outage in words", async () => {
  const [url] = await peer.ask("start_cluster");
  const moved = await pass(url, "moved", (number, keys) => peer.ask("move_slot", { key: keys[number % keys.length] }));
  assert.deepEqual(names(moved.shared).sort(), all(SIZES).sort());
  await assertClean("moved", url);
  const half = await pass(url, "half", async (number, keys) => {
    if (number !== 2) return;
    const key = keys[1 + number];
    await peer.ask("half_move", { key });
    setTimeout(() => void peer.ask("move_slot", { key }), 1000);
  });
  assert.deepEqual([...new Set(names(half.shared))].sort(), all(SIZES).sort());
  const line = half.said.find((one) => one.includes("half moved")) ?? half.said.join("\n");
  assert.match(line, /^the server refused while .* \(.*redis-cli --cluster fix HOST:PORT`\); trying again/);
  await assertClean("half", url);
  await peer.ask("end_cluster");
});

test("a master that stands still ages no lease on the others, whose batches are handed out", async () => {
  const [url] = await peer.ask("start_cluster");
  const writer = await openWriter("still", { url, spec: SPEC, blockBytes: 10_000, partitions: 3, notify: () => {} });
  const sizes = [200, 20, 200];
  const epoch = await writer.epoch(0, { sizes });
  for (const [number, size] of sizes.entries()) {
    const shard = await epoch.shard(number);
    while (shard.position < size) await shard.write(sampleOf(SPEC, 1000 * number + shard.position));
    await shard.close();
  }
  await epoch.close();
  await writer.close();
  const leaseMs = 1500;
  const options = { acknowledge: "manual", leaseMs, timeoutMs: 30_000, notify: () => {} };
  const loader = load("still", { group: "g", batchSize: 20, url, ...options });
  loaders.push(loader);
  const batches = loader[Symbol.asyncIterator]();
  const taken = [];
  const take = async () => taken.push((await batches.next()).value);
  const shards = () => taken.flatMap(({ spans }) => spans.map(({ shard }) => shard));
  while (!shards().includes(1)) await take();
  const [, first, away, last] = await peer.ask("keys_of", { stream: "still", url });
  const entries = [first, last].map((key) => key.replace("roster", "0:entries"));
  await peer.ask("stop_master", { key: away, seconds: 2.5 * (leaseMs / 1000) });
  while (taken.length < 21) await take(); // all but the end of the epoch, which waits for the silent master
  const idle = await peer.ask("idle_ms", { keys: entries, group: "g" });
  await peer.ask("go_on");
  assert.ok(idle.length > 0 && Math.max(...idle) < leaseMs, `${idle}`);
  for (const batch of taken) await batch.ack();
  assert.equal((await batches.next()).done, true);
  await closeAll();
  await assertClean("still", url);
  await peer.ask("end_cluster");
});

/** A writer of one shard in a partition of its own, of which a given number of samples is committed. */
async function begun(stream, url, partition, count, size, partitions = 3) {
  const spec = { x: ["uint8", [10]] };
  const writer = await openWriter(stream, { url, spec, blockBytes: 100, partitions, notify: () => {} });
  const epoch = await writer.epoch(0, {
    sizes: Array.from({ length: partitions }, (_, number) => (number === partition ? size : 0)),
  });
  const shard = await epoch.shard(partition);
  const write = async (end) => {
    while (shard.position < end) await shard.write(sampleOf(spec, shard.position));
    await shard.commitAll();
  };
  await write(count);
  const finish = async () => {
    await write(size);
    await shard.close();
    for (let number = 0; number < partitions; number += 1)
      if (number !== partition) await (await epoch.shard(number)).close();
    await epoch.close();
    await writer.close();
  };
  const [, ...rosters] = await peer.ask("keys_of", { stream, url });
  return { finish, roster: rosters[partition] };
}

test("a writer sends again what a failover loses before a replica has it", async () => {
  const [url] = await peer.ask("start_cluster", { replicas: 1 });
  const [spec, said] = [{ x: ["uint8", [10]] }, []];
  const options = { url, spec, blockBytes: 100, partitions: 3, durability: "replicas=1" };
  const writer = await openWriter("torn", { ...options, notify: (line) => said.push(line) });
  const epoch = await writer.epoch(0, { sizes: [60] });
  const [, roster] = await peer.ask("keys_of", { stream: "torn", url });
  const shard = await epoch.shard(0);
  const write = async (end) => {
    while (shard.position < end) await shard.write(sampleOf(spec, shard.position));
    await shard.commitAll();
  };
  await write(20);
  await peer.ask("cut_off", { key: roster });
  const written = write(60);
  written.catch(() => {}); // the error is raised where it is awaited
  const isToldSo = () => said.some((line) => line.includes("0 of 1 replicas have it"));
  for (const until = Date.now() + 60_000; !isToldSo() && Date.now() < until; ) {
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await peer.ask("fail_over");
  await peer.ask("add_replica", { key: roster });
  await written;
  await shard.close();
  await epoch.close();
  await writer.close();
  const report = await peer.ask("audit_report", { stream: "torn", url });
  assert.deepEqual([report.clean, report.findings, report.produced, report.lost], [true, [], 60, 0]);
  await peer.ask("end_cluster");
});

const MANUAL = { batchSize: 10, acknowledge: "manual", prefetchBytes: 1, notify: () => {} };

for (const [order, options] of Object.entries({ shared: {}, canonical: { rank: 0, worldSize: 1 } })) {
  for (const durability of ["memory", "replicas"]) {
    test(`what a ${order} member acknowledged and a failover lost is on the server again (${durability})`, async () => {
      const [url] = await peer.ask("start_cluster", { replicas: 1 });
      const { finish, roster } = await begun("again", url, 0, 60, 120);
      if (durability === "replicas") {
        const meta = roster.replace(/\{.*$/, "{again}:meta");
        await peer.ask("ask", { url, command: ["HSET", meta, "durability", "replicas=1"] });
      }
      const loader = load("again", { ...MANUAL, group: "g", url, ...options });
      loaders.push(loader);
      const loop = loader[Symbol.asyncIterator]();
      const train = async () => await (await loop.next()).value.ack();
      await train();
      await peer.ask("cut_off", { key: roster });
      for (let batches = 1; batches < 6; batches += 1) await train();
      const [kind, command] = order === "shared" ? ["ledger:g:0", "BITCOUNT"] : ["pos:g", "HGET"];
      const key = roster.replace("roster", `0:${kind}`);
      const known = () => peer.ask("ask", { url, command: [command, key, ...(order === "shared" ? [] : ["0"])] });
      assert.equal(Number(await known()), 60);
      await peer.ask("fail_over");
      const until = Date.now() + 30_000;
      while (Number(await known()) < 60 && Date.now() < until) await new Promise((resolve) => setTimeout(resolve, 50));
      assert.equal(Number(await known()), 60);
      const finished = finish();
      for (let next = await loop.next(); !next.done; next = await loop.next()) await next.value.ack();
      await finished;
      await closeAll();
      await peer.ask("end_cluster");
    });
  }
}

for (const who of ["the member", "another member"]) {
  test(`what was acknowledged is not delivered again as new by a replica that lacks that (${who})`, async () => {
    const [url] = await peer.ask("start_cluster", { replicas: 1 });
    const { finish, roster } = await begun("once", url, 1, 60, 120);
    const found = [];
    const [loader, other] = ["a", "b"].map((member) => load("once", { ...MANUAL, group: "g", member, url }));
    loaders.push(loader, other);
    await loader.open();
    if (who === "another member") await other.open();
    const train = async (loop, most = Number.POSITIVE_INFINITY) => {
      for (let batches = 0; batches < most; batches += 1) {
        const { done, value } = await loop.next();
        if (done) return;
        found.push([...value.identities()]);
        await value.ack();
      }
    };
    const loop = loader[Symbol.asyncIterator]();
    await train(loop, 1);
    await peer.ask("cut_off", { key: roster });
    await train(loop, 5);
    await peer.ask("fail_over");
    await Promise.all([train(who === "the member" ? loop : other[Symbol.asyncIterator]()), finish()]);
    if (who === "another member") await train(loop);
    assert.deepEqual(names(found).sort(), all([0, 120]).sort());
    await closeAll();
    await peer.ask("end_cluster");
  });
}

for (const [order, options] of Object.entries({ shared: {}, canonical: { rank: 0, worldSize: 1 } })) {
  test(`an epoch that a failover loses as a whole is read in the same pass once it is open again (${order})`, async () => {
    const [url] = await peer.ask("start_cluster", { replicas: 1 });
    const spec = { x: ["uint8", [3, 5]], y: ["int64", []] };
    const notify = (line) => said.push(line);
    const [sizes, said, found] = [[20, 20], [], []];
    const stream = "whole";
    await (await openWriter(stream, { url, spec, partitions: 3, durability: "memory", notify })).close();
    const loader = load(stream, { group: "g", batchSize: 5, url, notify, ...options });
    loaders.push(loader);
    await loader.open();
    const [meta] = await peer.ask("keys_of", { stream, url });
    await peer.ask("cut_off", { key: meta });
    await peer.ask("plan", { stream, sizes, url });
    await peer.ask("write_planned", { shard: 0, size: 20 });
    const loop = loader[Symbol.asyncIterator]();
    const train = async () => {
      for (let next = await loop.next(); !next.done; next = await loop.next()) found.push([...next.value.identities()]);
    };
    found.push([...(await loop.next()).value.identities()]);
    const trained = train();
    trained.catch(() => {}); // the error is raised where it is awaited
    await peer.ask("fail_over");
    const isLost = () => said.some((line) => line.includes("epoch 0 of 'whole' is gone, and nobody released it"));
    for (const until = Date.now() + 60_000; !isLost() && Date.now() < until; ) {
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    assert.ok(isLost(), said.join("\n"));
    assert.ok(!said.some((line) => line.includes("released while it was read")), said.join("\n"));
    await peer.ask("open_again", { sizes });
    await trained;
    assert.deepEqual([...new Set(names(found))].sort(), all(sizes).sort());
    await closeAll();
    const { produced, lost, duplicate } = await peer.ask("audit_report", { stream, url });
    assert.deepEqual([produced, lost, duplicate], [40, 0, 0]); // its writer also noted what the server had lost
    await peer.ask("end_cluster");
  });
}

test("a key that moved lacks nothing unless a replica took over", async () => {
  const [url] = await peer.ask("start_cluster", { replicas: 1 });
  const [server, key] = [await Server.open({ url }), "{moved}key"];
  const asked = async () => await server.call("GET", key).catch(() => {});
  await server.call("SET", key, "1");
  const watch = new RunWatch(server, [key]);
  assert.equal(await watch.isAnother(), false);
  for (let moves = 0; moves < 2; moves += 1) {
    await peer.ask("move_slot", { key });
    await asked(); // the answer names the new master
    assert.equal(await watch.isAnother(), false);
  }
  const before = server.placeOf(key);
  await peer.ask("cut_off", { key });
  await peer.ask("fail_over");
  for (const end = Date.now() + 60_000; server.placeOf(key) === before && Date.now() < end; ) await asked();
  assert.equal(await watch.isAnother(), true);
  assert.equal(await watch.isAnother(), false);
  server.close();
  await peer.ask("end_cluster");
});

test("what was acknowledged is not delivered again by the server that a slot moved to", async () => {
  const [url] = await peer.ask("start_cluster", { replicas: 1 });
  const { finish, roster } = await begun("apart", url, 4, 60, 120, 6);
  const found = [];
  const loader = load("apart", { ...MANUAL, group: "g", url });
  loaders.push(loader);
  const loop = loader[Symbol.asyncIterator]();
  const train = async (most = Number.POSITIVE_INFINITY) => {
    for (let batches = 0; batches < most; batches += 1) {
      const { done, value } = await loop.next();
      if (done) return;
      found.push([...value.identities()]);
      await value.ack();
    }
  };
  await train(1);
  await peer.ask("move_slot", { key: roster });
  await train(1);
  await peer.ask("cut_off", { key: roster });
  await train(4);
  await peer.ask("fail_over");
  await Promise.all([train(), finish()]);
  assert.deepEqual(names(found).sort(), all([0, 0, 0, 0, 120]).sort());
  await closeAll();
  await peer.ask("end_cluster");
});

/**
 * A server with a stream of two partitions. `before` is called, and awaited, before each command that is sent by `name`.
 * `restart` kills the server and starts it again, which a RunWatch takes for a replica that took over.
 */
async function restarting(name) {
  const directory = mkdtempSync(join(tmpdir(), "penstock-js-"));
  const [url, port] = await peer.ask("start_server", { directory });
  await peer.ask("produce", { stream: "t", spec: "fixed", sizes: [20, 20], partitions: 2, block_bytes: 250, url });
  const server = await Server.open({ url });
  const stream = await loadStream(server, "t");
  const hook = { before: async () => {} };
  const hooked = new Proxy(server, {
    get(target, property) {
      const found = Reflect.get(target, property, target);
      if (typeof found !== "function") return found;
      if (property !== name) return found.bind(target);
      return async (...args) => {
        await hook.before();
        return await found.apply(target, args);
      };
    },
  });
  const restart = async () => {
    await peer.ask("kill_server");
    await peer.ask("start_server", { directory, port });
    while (!(await server.call("PING").catch(() => null))) await new Promise((resolve) => setTimeout(resolve, 20));
  };
  const end = async () => {
    server.close();
    await peer.ask("kill_server");
    rmSync(directory, { recursive: true });
  };
  return { hooked, hook, stream, restart, end };
}

const refuse = async () => {
  throw new ServerUnavailable("CLUSTERDOWN The cluster is down");
};
/** An id as old as the first entry's. */
const OLDEST = "1-0";

test("what a server delivers stays in doubt if it refused the first question after it took over", async () => {
  const { hooked, hook, stream, restart, end } = await restarting("call");
  const check = new DeliveryCheck(hooked, stream.partitions);
  await check.look();
  await restart();
  hook.before = refuse;
  await assert.rejects(check.look(), ServerUnavailable);
  hook.before = async () => {};
  let settled = 0;
  for (let looks = 0; looks < 2; looks += 1) {
    await check.look(async () => {
      settled += 1;
    });
  }
  assert.equal(settled, 1);
  assert.ok(stream.partitions.every((partition) => check.doubts(partition, 0, OLDEST)));
  await end();
});

for (const moment of ["its entries are doubted", "acknowledgements are settled"]) {
  test(`a partition that is read apart while ${moment} is in doubt for both readers`, async () => {
    const { hooked, hook, stream, restart, end } = await restarting("call");
    const [, moved] = stream.partitions;
    const check = new DeliveryCheck(hooked, stream.partitions);
    await check.look();
    await restart();
    let other = null;
    const split = async () => {
      other ??= check.split([moved]);
    };
    if (moment === "its entries are doubted") hook.before = split;
    await check.look(split);
    let settled = 0;
    await other.look(async () => {
      settled += 1;
    });
    assert.equal(settled, 1); // else it would read before the ledger has again what was acknowledged
    assert.ok(other.doubts(moved, 0, OLDEST));
    assert.ok(check.doubts(moved, 0, OLDEST), "what was asked for before is judged by the former check");
    await end();
  });
}

test("acknowledgements are not taken for settled while their server cannot be asked who it is", async () => {
  const { hooked, hook, stream, restart, end } = await restarting("callAt");
  const runs = [];
  const run = async (...call) => runs.push(call);
  const boxes = new Outboxes(run, hooked, stream, [stream.partitions]);
  await boxes.learn();
  await boxes.send(stream.partitions[0], "acknowledge", [], []);
  await restart();
  hook.before = refuse;
  await assert.rejects(boxes.attend(stream.partitions), ServerUnavailable);
  hook.before = async () => {};
  await boxes.attend(stream.partitions);
  assert.equal(runs.length, 2);
  boxes.close();
  await end();
});

/** Write an epoch of shards of `sizes` samples of 1 kB, in blocks of `size`. Returns the roster of each partition. */
async function written(stream, url, partitions, { sizes, size }) {
  const spec = { x: ["uint8", [1000]] };
  const writer = await openWriter(stream, { url, spec, blockBytes: 1000 * size, partitions, notify: () => {} });
  const epoch = await writer.epoch(0, { sizes });
  for (const [number, each] of sizes.entries()) {
    const shard = await epoch.shard(number);
    while (shard.position < each) await shard.write(sampleOf(spec, 1000 * number + shard.position));
    await shard.close();
  }
  await epoch.close();
  await writer.close();
  const [, ...rosters] = await peer.ask("keys_of", { stream, url });
  return rosters;
}

test("partitions beside a moved one do not wait for its new master", async () => {
  const timeoutMs = 4000;
  const [url] = await peer.ask("start_cluster", { replicas: 1, node_timeout_ms: timeoutMs });
  // the neighbour's shard, 1, is so long that it still has batches when the others on its master have none
  const [sizes, size] = [[480, 1440, 480, 480, 480, 480], 10];
  const rosters = await written("moved", url, sizes.length, { sizes, size });
  const loader = load("moved", { group: "g", batchSize: size, url, prefetchBytes: 30 * 1000 * size, notify: () => {} });
  loaders.push(loader);
  const given = [];
  let since = Number.POSITIVE_INFINITY;
  for await (const batch of loader) {
    given.push({ at: performance.now(), identities: [...batch.identities()] });
    if (given.length === 10) await peer.ask("move_slot", { key: rosters[4] }); // partitions 1 and 4 were on one master
    if (given.length === 110) {
      await peer.ask("lose_master", { key: rosters[4], fault: "stop" });
      since = performance.now();
    }
    await new Promise((resolve) => setTimeout(resolve, 30));
  }
  await closeAll();
  assert.equal(new Set(names(given.map(({ identities }) => identities))).size, 3840);
  const beside = given.filter(({ at, identities: [[, shard]] }) => shard === 1 && at > since).map(({ at }) => at);
  assert.ok(beside.at(-1) - since > timeoutMs / 2, "the neighbour had batches while it was away");
  const longest = Math.max(...beside.map((at, before) => at - (before === 0 ? since : beside[before - 1])));
  assert.ok(longest < timeoutMs / 2, `the neighbour stood still for ${longest} ms`);
  await assertClean("moved", url);
  await peer.ask("end_cluster");
});

for (const [lost, fault] of [
  [0, "stop"],
  [1, "kill"],
]) {
  test(`partitions elsewhere go on while the master of partition ${lost} is away (${fault})`, async () => {
    const timeoutMs = 4000;
    const [url] = await peer.ask("start_cluster", { replicas: 1, node_timeout_ms: timeoutMs });
    const [sizes, size] = [new Array(6).fill(480), 10];
    const rosters = await written("away", url, 3, { sizes, size });
    // more of the lost master's batches are read ahead than may be acknowledged at once without an answer
    const prefetchBytes = 60 * 1000 * size;
    const said = [];
    const loader = load("away", { group: "g", batchSize: size, url, prefetchBytes, notify: (line) => said.push(line) });
    loaders.push(loader);
    const given = [];
    let since = Number.POSITIVE_INFINITY;
    for await (const batch of loader) {
      given.push({ at: performance.now(), identities: [...batch.identities()] });
      if (given.length === 20) {
        await peer.ask("lose_master", { key: rosters[lost], fault });
        since = performance.now();
      }
      await new Promise((resolve) => setTimeout(resolve, 30));
    }
    await closeAll();
    assert.equal(new Set(names(given.map(({ identities }) => identities))).size, 2880);
    const isElsewhere = ({ identities: [[, shard]] }) => shard % 3 !== lost;
    const lastAt = given.findLast(isElsewhere).at;
    assert.ok(lastAt - since > timeoutMs, "others had batches while it was away");
    const times = [since, ...given.map(({ at }) => at).filter((at) => since < at && at <= lastAt)];
    const longest = Math.max(...times.slice(1).map((at, before) => at - times[before]));
    assert.ok(longest < timeoutMs / 2, `all stood still for ${longest} ms`);
    assert.ok(said.filter((line) => line.startsWith("the connection broke")).length < 10, said.join("\n"));
    await assertClean("away", url);
    await peer.ask("end_cluster");
  });
}

for (const fault of ["stop", "switch"]) {
  test(`the primary of a service is lost (${fault}), and all go on with the next one`, async () => {
    const url = await peer.ask("start_service");
    const { shared } = await pass(url, "served", async (number, _keys, given) => {
      if (number !== 2) return;
      while (given.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
      await peer.ask("fail_service", { fault });
    });
    assert.deepEqual([...new Set(names(shared))].sort(), all(SIZES).sort());
    await assertClean("served", url);
    if (fault === "switch") {
      await assert.rejects(openWriter("none", { url: url.replace("/feed", "/other") }), (error) => {
        assert.ok(error instanceof ServerUnavailable);
        assert.match(error.message, /no Sentinel names a primary .* knows no service 'other'/);
        return true;
      });
      await assert.rejects(openWriter("none", { url: url.replace("/feed", "") }), BadOption);
    }
    await peer.ask("end_service");
  });
}
