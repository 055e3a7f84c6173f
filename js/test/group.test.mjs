// A group gets every sample exactly once, with members in any language, and its epochs close as Python's do.
import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { createClient } from "@redis/client";
import {
  BadName,
  BadOption,
  EpochsReleased,
  GroupFinished,
  GroupKindMismatch,
  GroupNotFound,
  load,
  MemberReplaced,
  openWriter,
  StateMismatch,
  StreamNotFound,
  TooManyDeadLetters,
  WaitTimeout,
} from "../dist/index.js";
import { loadScript } from "../dist/scripts.js";
import { all, names } from "./members.mjs";
import { startPeer, told } from "./peer.mjs";

let peer;
let client;
const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));

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
  const loader = load(stream, { group: "node", batchSize: 7, url: peer.url, notify: () => {}, ...options });
  loaders.push(loader);
  return loader;
}

afterEach(async () => {
  for (const loader of loaders.splice(0)) await loader.close();
});

async function collect(loader, most = Number.POSITIVE_INFINITY) {
  const found = [];
  for await (const batch of loader) {
    found.push(told(batch));
    if (found.length >= most) break;
  }
  return found;
}

/** The batches' samples in the order of their identities. */
const sorted = (batches) => batches.flatMap(([identities]) => identities).sort();

const isClean = async (stream) => {
  const [code, said] = await peer.ask("audit", { stream });
  assert.equal(code, 0, said);
};

const STREAMS = {
  fixed: { spec: "fixed", sizes: [50, 0, 33], holes: [3, 4, 49], block_bytes: 200 },
  partitioned: { spec: "fixed", sizes: [20, 30, 40, 5], partitions: 3, block_bytes: 200 },
  digits: { spec: "digits", sizes: [40], block_bytes: 100 },
  ragged: { spec: "ragged", sizes: [30, 40], holes: [0], block_bytes: 500 },
  segments: { spec: "ragged", sizes: [30, 40], payload: `segments:${folder}/segments`, block_bytes: 500 },
};

for (const [stream, options] of Object.entries(STREAMS)) {
  test(`${stream}: one member gets every sample once, bit for bit, and the epochs close`, async () => {
    await peer.ask("produce", { stream, ...options, epochs: 2 });
    const loader = begin(stream, { batchSize: 1 });
    for (const epoch of [0, 1]) {
      const [expected] = await peer.ask("replay", { stream, epoch, batch_size: 1 });
      const found = await collect(loader);
      const byIdentity = ([a], [b]) => (String(a) < String(b) ? -1 : 1);
      assert.deepEqual(found.sort(byIdentity), expected.sort(byIdentity));
    }
    const roster = (await client.keys(`penstock:{${stream}.*}:roster`)).sort();
    for (const key of roster) {
      assert.deepEqual([await client.hGet(key, "d:node:0"), await client.hGet(key, "d:node:1")], ["1", "1"]);
    }
    await loader.close();
    for (const key of roster)
      assert.deepEqual(
        (await client.hKeys(key)).filter((field) => field.startsWith("m:")),
        [],
      );
    await isClean(stream);
  });

  test(`${stream}: a second group, of a client in RESP2 or RESP3, gets every sample too`, async () => {
    for (const RESP of [2, 3]) {
      const own = createClient({ url: peer.url, RESP });
      await own.connect();
      const loader = begin(stream, { group: `resp${RESP}`, client: own });
      const { samples } = loader.state.name ? { samples: all(options.sizes).length } : {};
      const holes = options.sizes.reduce(
        (sum, size) => sum + (options.holes ?? []).filter((at) => at < size).length,
        0,
      );
      assert.equal(sorted(await collect(loader)).length, samples - holes);
      await loader.close();
      assert.equal(await own.ping(), "PONG"); // the caller closes it
      own.destroy();
    }
    await isClean(stream);
  });
}

test("a client that cannot make another connection is polled", async () => {
  const own = createClient({ url: peer.url });
  await own.connect();
  const only = { sendCommand: (...args) => own.sendCommand(...args) };
  const loader = begin("fixed", { group: "polling", client: only });
  assert.equal(sorted(await collect(loader)).length, 78);
  await loader.close();
  own.destroy();
});

test("close hands back what was not acknowledged, at once, and acknowledged samples stay so", async () => {
  const sizes = [40];
  await peer.ask("produce", { stream: "back", spec: "fixed", sizes, block_bytes: 150 });
  const said = [];
  const first = begin("back", {
    batchSize: 6,
    acknowledge: "manual",
    member: "first",
    notify: (line) => said.push(line),
  });
  const given = [];
  for await (const batch of first) {
    given.push([...batch.identities()]);
    if (given.length === 3) break;
    await batch.ack();
  }
  await first.close();
  assert.deepEqual(said, ["6 samples were handed out and not acknowledged: they are handed out again"]);
  const rest = sorted(await collect(begin("back", { member: "second" })));
  assert.deepEqual(
    names([rest]).sort(),
    all(sizes)
      .filter((name) => !names(given.slice(0, 2)).includes(name))
      .sort(),
  );
  await isClean("back");
});

test("of two loaders of one process and name, the older one ends at once, and nothing is given twice", async () => {
  await peer.ask("produce", { stream: "same", spec: "fixed", sizes: [40], block_bytes: 150 });
  for (const order of [{}, { rank: 0, worldSize: 1 }]) {
    const group = order.worldSize ? "ranks" : "shared";
    const [older, newer] = [begin("same", { group, ...order }), begin("same", { group, ...order })];
    await older.open();
    const [first] = await collect(newer, 1);
    const advice = order.worldSize ? /as 'rank-0'.*a rank is one loader/ : /as member '.*a `member` of its own/;
    await assert.rejects(
      older[Symbol.asyncIterator]().next(),
      (error) =>
        error instanceof MemberReplaced &&
        /another loader of this process/.test(error.message) &&
        advice.test(error.message),
    );
    const rest = await collect(newer);
    const whole = sorted([first, ...rest]);
    assert.equal(new Set(whole.map(String)).size, 40);
  }
});

test("a program that leaves its loop again and again makes no sample suspect", async () => {
  await peer.ask("produce", { stream: "left", spec: "fixed", sizes: [40], block_bytes: 150 });
  const said = [];
  for (let turn = 0; turn < 7; turn += 1) {
    const loader = begin("left", { acknowledge: "manual", notify: (text) => said.push(text) });
    await collect(loader, 1);
    await loader.close();
  }
  const loader = begin("left", { notify: (text) => said.push(text) });
  assert.equal(new Set(sorted(await collect(loader)).map(String)).size, 40);
  assert.deepEqual(
    said.filter((text) => text.includes("does training die on it?")),
    [],
  );
});

test("each call of close returns once the loader has left", async () => {
  await peer.ask("produce", { stream: "closing", spec: "fixed", sizes: [40], block_bytes: 150 });
  const loader = begin("closing", { acknowledge: "manual" });
  await collect(loader, 2);
  const first = loader.close();
  await loader.close();
  const [roster] = await client.keys("penstock:{closing.*}:roster");
  const members = (await client.hKeys(roster)).filter((field) => field.startsWith("m:"));
  await first;
  assert.deepEqual(members, []);
});

test("asking for the next batch acknowledges the one before, and a loop that is left keeps its last one", async () => {
  await peer.ask("produce", { stream: "asked", spec: "fixed", sizes: [30], block_bytes: 1000 });
  const loader = begin("asked", { batchSize: 10 });
  const found = await collect(loader, 2);
  await loader.close();
  const rest = await collect(begin("asked", { batchSize: 10 }));
  const ids = (batches) => names(batches.map(([identities]) => identities)).sort();
  assert.deepEqual(
    ids(rest),
    all([30])
      .filter((name) => !ids(found.slice(0, 1)).includes(name))
      .sort(),
  );
  await isClean("asked");
});

test("a checkpoint acknowledges all that was handed out, and says where the loader stands", async () => {
  await peer.ask("produce", { stream: "saved", spec: "fixed", sizes: [30], block_bytes: 1000 });
  const loader = begin("saved", { batchSize: 10, acknowledge: "manual" });
  const found = await collect(loader, 2);
  const { loader: life, ...state } = await loader.checkpoint();
  assert.match(life, /^[0-9a-f]{16}$/);
  const python = (await peer.ask("load", { stream: "saved", group: "python", batch_size: 10, most: 2 })).state;
  assert.deepEqual({ ...state, group: "python", loader: python.loader }, python);
  await loader.close();
  const rest = await collect(begin("saved"));
  assert.equal(sorted([...found, ...rest]).length, 30);
  assert.throws(() => begin("saved").state(), BadOption);
  await assert.rejects(begin("saved", { batchSize: 9, state: { ...state, batch_size: 10 } }).open(), StateMismatch);
});

test("an acknowledgement is on the server when ack() returns, and a second one does nothing", async () => {
  await peer.ask("produce", { stream: "acks", spec: "fixed", sizes: [20], block_bytes: 1000 });
  const loader = begin("acks", { batchSize: 5, acknowledge: "manual" });
  const [ledger] = (await client.keys("penstock:{acks.*}:roster")).map((key) =>
    key.replace("roster", "0:ledger:node:0"),
  );
  let count = 0;
  for await (const batch of loader) {
    await batch.ack();
    await batch.ack();
    count += batch.size;
    assert.equal(await client.bitCount(ledger), count);
  }
});

test("a group that is misspelt is told so, and one that may not be made is not", async () => {
  const said = [];
  await begin("fixed", { group: "nodes", notify: (line) => said.push(line) }).open();
  assert.match(said[0], /^new group 'nodes' \(there are: .*\); it starts at epoch 0\. Did you mean 'node'\?$/);
  await assert.rejects(begin("fixed", { group: "nods", create: false }).open(), (error) => {
    assert.ok(error instanceof GroupNotFound);
    assert.match(error.message, /has no group 'nods'.*did you mean 'node/);
    return true;
  });
});

test("the notice on a new group names three of many others", async () => {
  await peer.ask("produce", { stream: "sweep", spec: "fixed", sizes: [4], block_bytes: 150 });
  const said = [];
  for (const trial of [0, 1, 2, 3, 4, 5]) {
    const loader = begin("sweep", { group: `trial-${trial}`, notify: (line) => said.push(line) });
    await loader.open();
    await loader.close();
  }
  assert.match(said.at(-1), /^new group 'trial-5' \(there are: trial-2, trial-3, trial-4 and 2 more\); it starts/);
});

test("options that cannot be meant are refused", async () => {
  for (const wrong of [
    { batchSize: 0 },
    { start: "begin" },
    { acknowledge: "later" },
    { leaseMs: 5 },
    { timeoutMs: 0 },
  ]) {
    assert.throws(() => load("fixed", { group: "g", batchSize: 1, ...wrong }), BadOption, JSON.stringify(wrong));
  }
  assert.throws(() => load("fixed", { group: "_g", batchSize: 1 }), BadName);
  await peer.ask("load", { stream: "fixed", group: "ranked", batch_size: 5, rank: [0, 1] });
  await assert.rejects(begin("fixed", { group: "ranked" }).open(), GroupKindMismatch);
});

test("an unknown stream is an error, or is waited for", async () => {
  await assert.rejects(begin("fixd", { wait: false }).open(), (error) => {
    assert.ok(error instanceof StreamNotFound);
    assert.match(error.message, /did you mean 'fixed'\?/);
    return true;
  });
  await assert.rejects(begin("nowhere", { timeoutMs: 50 }).open(), StreamNotFound);
  const loader = begin("late");
  const found = collect(loader);
  await peer.ask("produce", { stream: "late", spec: "fixed", sizes: [9] });
  assert.equal(sorted(await found).length, 9);
});

test("an epoch that is not produced yet is waited for, in words", async () => {
  const said = [];
  const loader = begin("late", { notify: (line) => said.push(line), timeoutMs: 3500 });
  assert.equal(await loader.open().then(({ firstEpoch }) => firstEpoch), 0);
  await assert.rejects(collect(loader), WaitTimeout);
  assert.match(
    said[0],
    /^waiting: group 'node' has read epoch 0 of 'late'; there is no other: `penstock produce` makes/,
  );
});

test("a finished learner of a feed is told of writers", async () => {
  const writer = await openWriter("feed", { url: peer.url, spec: { x: ["uint8", [2]] }, notify: () => undefined });
  await writer.write({ x: new Uint8Array(2) });
  await writer.close();
  const loader = begin("feed", { timeoutMs: 1500 });
  await assert.rejects(collect(loader), /there is no other: a Writer makes one; .*; is a producer running\?/);
});

test("start reads again from an epoch, and a group that has read all says so", async () => {
  await client.hSet("penstock:{digits}:meta", "final", "2");
  const loader = begin("digits", { start: 1 });
  assert.equal(sorted(await collect(loader)).length, 40);
  assert.deepEqual(await collect(loader), []); // told once
  await assert.rejects(collect(loader), GroupFinished);
  await loader.close();
  await assert.rejects(collect(begin("digits")), GroupFinished);
  const begun = /to begin with epoch 2 of 'digits', of which 2 were begun .*; `penstock produce` makes epoch 2 next$/;
  await assert.rejects(collect(begin("digits", { group: "next", start: 2 })), begun);
  const again = begin("digits", { start: "earliest" });
  const under = /is read by .* would reset it under them; .*counts as gone at most 30 s after it was last seen$/;
  const first = await collect(again);
  await assert.rejects(collect(begin("digits", { start: "earliest", member: "late" })), under);
  assert.equal(sorted([...first, ...(await collect(again))]).length, 80);
  await again.close();
  await isClean("digits");
});

for (const options of [{}, { rank: 0, worldSize: 1 }]) {
  const kind = "rank" in options ? "canonical" : "shared";
  test(`a group in ${kind} order that lost an epoch goes on where it stands`, async () => {
    const stream = `lost-${kind}`;
    await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 500, epochs: 2 });
    const first = begin(stream, { ...options, acknowledge: "manual" });
    const given = [];
    for await (const batch of first) {
      given.push([...batch.identities()]);
      await batch.ack();
      if (given.length === 2) break;
    }
    await first.close();
    await peer.ask("release", { stream, epoch: 1, url: peer.url });
    await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 500 });
    await assert.rejects(collect(begin(stream, options)), (error) => {
      assert.ok(error instanceof EpochsReleased);
      return /epochs 1-1 .* give start: 'remaining' to go on without them/.test(error.message);
    });
    const back = begin(stream, { ...options, start: "remaining" });
    const rest = [...(await collect(back)), ...(await collect(back))];
    await back.close();
    const epochs = (number) => names(rest.map(([one]) => one)).filter((name) => name.startsWith(`${number}/`)).length;
    assert.deepEqual([epochs(0) + names(given).length, epochs(1), epochs(2)], [40, 0, 40]);
  });
}

test("a group goes on without an epoch that it lost in part", async () => {
  const stream = "lost-in-part";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 500, epochs: 2 });
  const first = begin(stream);
  await collect(first);
  await first.close();
  const tag = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"))[0];
  const keys = ["roster", "1:entries", "1:segments"].map((key) => `penstock:{${stream}.${tag}}:${key}`);
  const [{ id }] = await client.xRange(keys[1], "-", "+", { COUNT: 1 });
  const generation = await client.hGet(keys[0], "gen");
  assert.equal(await client.eval(loadScript("trim"), { keys, arguments: [generation, "1", id, "500", ""] }), 500);
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 500 });
  await assert.rejects(collect(begin(stream)), EpochsReleased);
  const back = begin(stream, { start: "remaining" });
  assert.ok(names((await collect(back)).map(([one]) => one)).every((name) => name.startsWith("2/")));
  await back.close();
});

test("a feed is read across its epochs, while it is written", async () => {
  const loader = begin("fed", { batchSize: 4 });
  const found = [];
  const writing = peer.ask("feed", { stream: "fed", samples: 10 });
  for await (const batch of loader) {
    found.push([...batch.identities()]);
    if (names(found).length === 10) await writing.then(() => peer.ask("feed", { stream: "fed", samples: 10 }));
    if (names(found).length === 20) break;
  }
  assert.equal(new Set(names(found)).size, 20);
  await loader.checkpoint();
  await loader.close();
  await isClean("fed");
});

test("ack tells that the server has it, and behind the end of the loader that it comes again", async () => {
  const loader = begin("fixed", { group: "ended", acknowledge: "manual" });
  const batches = [];
  for await (const batch of loader) if (batches.push(batch) === 2) break;
  const [first, second] = batches;
  assert.deepEqual([await first.ack(), await first.ack()], [true, true]);
  await loader.close();
  assert.equal(await first.ack(), true);
  await assert.rejects(
    second.ack(),
    /^PenstockError: this loader of 'fixed' was closed before 7 samples were acknowledged: the group hands them out again$/,
  );
});

test("two loops over one loader are refused", async () => {
  const loader = begin("fixed", { group: "twice" });
  const older = loader[Symbol.asyncIterator]();
  await older.next();
  await loader[Symbol.asyncIterator]().next();
  await assert.rejects(older.next(), /is read by another loop/);
});

test("what nobody can read becomes a dead letter as in Python, and the epoch ends", async () => {
  const stream = "dead";
  await peer.ask("produce", { stream, ...STREAMS.segments, payload: `segments:${folder}/dead` });
  const [roster] = await client.keys(`penstock:{${stream}.*}:roster`);
  const key = (rest) => roster.replace("roster", `0:${rest}`);
  await client.xAdd(key("entries"), "*", { meta: "nonsense" });
  const root = join(folder, "dead");
  const own = join(
    root,
    readdirSync(root).find((name) => name.startsWith(`${stream}.`)),
  );
  const segments = readdirSync(own)
    .filter((name) => name.endsWith(".seg"))
    .map((name) => join(own, name));
  const reasons = async (group) =>
    Object.fromEntries(
      Object.entries(await client.hGetAll(key(`dead:${group}`))).map(([id, text]) => [
        id,
        JSON.parse(text).why.split(":")[0],
      ]),
    );
  const count = sorted(await collect(begin(stream, { group: "before" }))).length;
  assert.equal(count, 70);
  assert.deepEqual(Object.values(await reasons("before")), ["BadEntry"]);
  await peer.ask("load", { stream, group: "python", batch_size: 7 });
  assert.deepEqual(await reasons("python"), await reasons("before"));
  const [first, ...others] = segments;
  writeFileSync(first, "");
  const left = sorted(await collect(begin(stream, { group: "after" }))).length;
  const { batches } = await peer.ask("load", { stream, group: "later", batch_size: 7 });
  assert.equal(left, sorted(batches).length);
  assert.ok(left > 0 && left < 70);
  assert.deepEqual(await reasons("after"), await reasons("later"));
  assert.ok(Object.values(await reasons("after")).includes("SegmentGone"));
  for (const file of others) writeFileSync(file, "");
  const hopeless = begin(stream, { group: "hopeless" });
  await assert.rejects(collect(hopeless), (error) => {
    assert.ok(error instanceof TooManyDeadLetters);
    assert.match(error.message, /SegmentGone: .*files of payloads are gone.*`penstock audit dead --repair SOURCE...`/);
    assert.doesNotMatch(error.message, /version/);
    return true;
  });
  assert.deepEqual(await reasons("hopeless"), {});
});
