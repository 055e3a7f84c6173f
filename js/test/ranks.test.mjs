// A rank in Node is given what a rank in Python is, to the sample, and the two may be ranks of one group.
import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";
import { createClient, RESP_TYPES } from "@redis/client";
import {
  BadOption,
  EpochIncomplete,
  GroupBusy,
  GroupKindMismatch,
  load,
  MemberReplaced,
  OrderNeedsSizes,
  openWriter,
  ReplayTruncated,
  StateMismatch,
  TooLarge,
} from "../dist/index.js";
import { all, killAll, names, repeated, slotState, startMember } from "./members.mjs";
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

/** A rank that is closed after the test. */
function begin(stream, options = {}) {
  const given = { group: "node", batchSize: 7, rank: 0, worldSize: 1, url: peer.url, notify: () => {} };
  const loader = load(stream, { ...given, ...options });
  loaders.push(loader);
  return loader;
}

afterEach(async () => {
  await killAll();
  await Promise.allSettled(loaders.splice(0).map((loader) => loader.close())); // a replaced rank's acknowledgements fail
});

async function collect(loader, most = Number.POSITIVE_INFINITY) {
  const found = [];
  for await (const batch of loader) {
    found.push(told(batch));
    if (found.length >= most) break;
  }
  return found;
}

/** What Python's rank is given. */
async function python(stream, options = {}) {
  const given = { stream, group: "python", batch_size: 7, rank: [0, 1], ...options };
  return await peer.ask("load", given);
}

/** The identities of batches as text. */
const ids = (batches) => names(batches.map(([identities]) => identities));

const isClean = async (stream) => {
  const [code, said] = await peer.ask("audit", { stream });
  assert.equal(code, 0, said);
};

const rosters = async (stream) => (await client.keys(`penstock:{${stream}.*}:roster`)).sort();

/** The key of epoch 0 in the first partition. */
const keyOf = async (stream, rest) => (await rosters(stream))[0].replace("roster", `0:${rest}`);

const STREAMS = {
  fixed: { spec: "fixed", sizes: [50, 0, 33], holes: [3, 4, 49], block_bytes: 200 },
  partitioned: { spec: "fixed", sizes: [20, 30, 40, 5], partitions: 3, block_bytes: 200 },
  digits: { spec: "digits", sizes: [40], block_bytes: 100 },
  ragged: { spec: "ragged", sizes: [30, 40], holes: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], block_bytes: 500 },
  segments: { spec: "ragged", sizes: [30, 40], holes: [39], payload: `segments:${folder}/segments`, block_bytes: 500 },
};

for (const [stream, options] of Object.entries(STREAMS)) {
  test(`${stream}: every rank gets Python's batches in Python's order, bit for bit, and the epochs close`, async () => {
    await peer.ask("produce", { stream, ...options, epochs: 2 });
    for (const worldSize of [1, 2, 3]) {
      for (const dropLast of [false, true]) {
        const group = `of-${worldSize}-${dropLast}`;
        for (let rank = 0; rank < worldSize; rank += 1) {
          const loader = begin(stream, { group, rank, worldSize, dropLast });
          const found = [...(await collect(loader)), ...(await collect(loader))];
          const asked = { rank: [rank, worldSize], drop_last: dropLast, group: `${group}-python`, epochs: 2 };
          const { batches } = await python(stream, asked);
          assert.deepEqual(found, batches, `${group}, rank ${rank}`);
          await loader.close();
        }
        for (const roster of await rosters(stream)) {
          assert.deepEqual(await client.hmGet(roster, [`d:${group}:0`, `d:${group}:1`]), ["1", "1"]);
        }
      }
    }
    await isClean(stream);
  });
}

test("a hole is filled with the next good sample, and a last step with the epoch's first samples", async () => {
  const loader = begin("fixed", { group: "filled", rank: 1, worldSize: 2, batchSize: 25 });
  const found = await collect(loader);
  // positions 25 to 49, of which 49 is a hole, and then 75 to 99, of which the epoch has those below 83
  const first = all([50]).slice(25, 49);
  const second = [
    ...all([50, 0, 33]).slice(75, 83),
    ...all([50]).slice(0, 3),
    "0/0/5",
    "0/0/5",
    ...all([50]).slice(5, 17),
  ];
  assert.deepEqual(ids(found), [...first, "0/2/0", ...second]);
});

test("ranks in Node and Python share an epoch, in one group and in step", async () => {
  const stream = "mixed";
  const sizes = [70, 90];
  await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 200, partitions: 2, holes: [8] });
  const expected = [];
  for (const rank of [0, 1]) expected.push((await python(stream, { group: "alone", rank: [rank, 2] })).batches);
  const given = { stream, group: "both", batch_size: 7, url: peer.url, pause_s: 0.01 };
  const node = startMember("node", { ...given, rank: [0, 2] });
  const other = startMember("python", { ...given, rank: [1, 2] });
  await Promise.all([node.ended, other.ended]);
  assert.ok(node.hasLeft && other.hasLeft, node.said + other.said);
  assert.deepEqual([names(node.given), names(other.given)], expected.map(ids));
  for (const roster of await rosters(stream)) assert.equal(await client.hGet(roster, "d:both:0"), "1");
  await isClean(stream);
});

for (const [firstIs, secondIs] of [
  ["node", "node"],
  ["python", "node"],
  ["node", "python"],
]) {
  test(`a killed ${firstIs} rank is continued in ${secondIs} with exactly the next sample`, async () => {
    const stream = `killed-${firstIs}-${secondIs}`;
    await peer.ask("produce", { stream, spec: "fixed", sizes: [70, 90], block_bytes: 200, partitions: 2, holes: [8] });
    const expected = ids((await python(stream, { group: "alone", rank: [1, 2] })).batches);
    const given = { stream, group: "g", batch_size: 7, url: peer.url, pause_s: 0.01 };
    const beside = startMember("python", { ...given, rank: [0, 2] });
    const first = startMember(firstIs, { ...given, rank: [1, 2] });
    await first.until(({ acknowledged }) => acknowledged.length >= 4);
    await first.kill();
    const positions = await keyOf(stream, "pos:g");
    const done = (Number(await client.hGet(positions, "1")) / 14) * 7;
    // Node says that it acknowledged once the server has it
    if (firstIs === "node") assert.ok(done >= names(first.acknowledged).length);
    const second = startMember(secondIs, { ...given, rank: [1, 2] });
    await Promise.all([second.ended, beside.ended]);
    assert.ok(second.hasLeft && beside.hasLeft, second.said + beside.said);
    assert.deepEqual(names(first.given), expected.slice(0, names(first.given).length));
    assert.deepEqual(names(second.given), expected.slice(done));
    for (const roster of await rosters(stream)) assert.equal(await client.hGet(roster, "d:g:0"), "1");
    await isClean(stream);
  });
}

test("a state of Node or of Python continues in the other with exactly the next sample", async () => {
  const stream = "states";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40, 30], epochs: 2, block_bytes: 200, holes: [4] });
  const whole = (await python(stream, { group: "whole", epochs: 2 })).batches;
  for (const most of [1, 4, 10, 13]) {
    const group = `g${most}`;
    const loader = begin(stream, { group, acknowledge: "manual" });
    const found = await collect(loader, Math.min(most, 10));
    if (most > 10) found.push(...(await collect(loader, most - 10)));
    const state = loader.state();
    await loader.close();
    assert.deepEqual(found, whole.slice(0, most));
    const { batches, state: theirs } = await python(stream, { group, state, most: 2 });
    assert.deepEqual(batches, whole.slice(most, most === 10 ? 12 : Math.min(most + 2, most < 10 ? 10 : 20)));
    const { loader: life, ...place } = theirs;
    assert.match(life, /^[0-9a-f]{16}$/);
    const again = begin(stream, { group, state: theirs });
    await again.open();
    const { loader: _, ...mine } = again.state();
    assert.deepEqual({ ...mine, batches: place.batches, samples: place.samples }, place);
    const rest = [...(await collect(again)), ...(place.epoch === 0 ? await collect(again) : [])];
    assert.deepEqual(rest, whole.slice(most + batches.length));
    await again.close();
  }
  await isClean(stream);
});

test("a state goes back behind what was acknowledged, until retention has removed it", async () => {
  const stream = "back";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40], epochs: 2, block_bytes: 200 });
  await python(stream, { group: "holding", most: 1 }); // so that the epochs stay
  const whole = (await python(stream, { group: "whole", epochs: 2 })).batches;
  const loader = begin(stream);
  await collect(loader, 2);
  const state = loader.state();
  await collect(loader);
  await collect(loader);
  await loader.close();
  const again = begin(stream, { state });
  assert.deepEqual([...(await collect(again)), ...(await collect(again))], whole.slice(2));
  await again.close();
  for (const roster of await rosters(stream)) await client.hSet(roster, "t:0", "1");
  await assert.rejects(begin(stream, { state }).open(), (error) => {
    assert.ok(error instanceof ReplayTruncated);
    assert.match(error.message, /cannot be read again from position 14: group 'node' had acknowledged all below 42/);
    return true;
  });
});

test("a server that came back older refuses a newer state", async () => {
  const stream = "older";
  const epochs = async (count) =>
    await peer.ask("produce", { stream, spec: "fixed", sizes: [40], epochs: count, block_bytes: 200 });
  await epochs(1);
  const first = begin(stream);
  await collect(first, 1);
  await first.close();
  const keys = [];
  for await (const found of client.scanIterator()) keys.push(...[found].flat());
  const backup = new Map();
  const raw = client.withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
  for (const key of keys) backup.set(key, await raw.dump(key));
  await epochs(3);
  const loader = begin(stream);
  for (let epoch = 0; epoch < 4; epoch++) await collect(loader, epoch < 3 ? undefined : 2);
  const state = loader.state();
  await loader.close();
  assert.equal(state.epoch, 3);
  await client.flushAll();
  for (const [key, value] of backup) await client.restore(key, 0, value);
  await assert.rejects(
    begin(stream, { state }).open(),
    /has epoch 3, the loader 1: the next epoch .* number 1: the server came back from/,
  );
  await epochs(4);
  await assert.rejects(
    begin(stream, { state }).open(),
    /has manifest .* epoch 3 was made again since: the server came/,
  );
});

test("with a state of every rank the number of ranks may change", async () => {
  const stream = "resized";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [80], block_bytes: 200 });
  const states = [];
  for (const rank of [0, 1]) {
    const loader = begin(stream, { rank, worldSize: 2 });
    await collect(loader, 2);
    states.push(await loader.checkpoint());
    await loader.close();
  }
  assert.equal(states[0].position, 28);
  const alone = begin(stream, { state: states[0], leaseMs: 6000 });
  assert.deepEqual(ids(await collect(alone)), all([80]).slice(28));
  assert.throws(() => begin(stream, { rank: 1, worldSize: 1 }), BadOption);
  const other = { ...states[0], position: 5 };
  await assert.rejects(begin(stream, { state: other, group: "node" }).open(), StateMismatch);
  await assert.rejects(begin(stream, { state: { ...states[0], kind: "shared" } }).open(), StateMismatch);
});

test("what is not acknowledged comes again, and a checkpoint acknowledges all that was handed out", async () => {
  await peer.ask("produce", { stream: "saved", spec: "fixed", sizes: [40], block_bytes: 200 });
  const first = begin("saved", { acknowledge: "manual" });
  await collect(first, 3);
  await first.close();
  const second = begin("saved", { acknowledge: "manual" });
  assert.deepEqual(ids(await collect(second, 3)), all([40]).slice(0, 21));
  assert.equal((await second.checkpoint()).position, 21);
  await collect(second, 1);
  await second.close();
  const third = begin("saved");
  assert.deepEqual(ids(await collect(third)), all([40]).slice(21));
  await isClean("saved");
});

test("asking for the next batch acknowledges the one before, and ack() everything up to its batch", async () => {
  await peer.ask("produce", { stream: "asked", spec: "fixed", sizes: [40], block_bytes: 200 });
  const positions = await keyOf("asked", "pos:node");
  const loader = begin("asked", { acknowledge: "manual" });
  const batches = [];
  for await (const batch of loader) {
    batches.push(batch);
    if (batches.length === 4) break;
  }
  await batches[2].ack();
  assert.equal(await client.hGet(positions, "0"), "21");
  await batches[0].ack();
  assert.equal(await client.hGet(positions, "0"), "21"); // a position never falls
  await loader.close();
  const next = begin("asked");
  let handed = 0;
  for await (const _ of next) {
    handed += 1;
    if (handed === 2) break;
  }
  await next.close();
  assert.equal(await client.hGet(positions, "0"), "28");
});

/** The sentence of a refusal in Node and in Python, without the names of options, which differ. */
async function refused(stream, mine, theirs, kind) {
  const sentence = (text) => text.replace(/batch_?size(?:=|: | )?|world_?size(?:=|: | )?/gi, "<option>");
  const here = await begin(stream, mine)
    .open()
    .then(
      () => assert.fail("it was not refused"),
      (error) => {
        assert.ok(error instanceof kind, String(error));
        return `${error.name}: ${error.message}`;
      },
    );
  const there = await peer.ask("load", { stream, ...theirs }).then(
    () => assert.fail("Python did not refuse it"),
    ({ message }) => message,
  );
  assert.equal(sentence(here), sentence(there));
}

test("a group that was begun in another way is refused in Python's words", async () => {
  const stream = "ways";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40], block_bytes: 200 });
  await peer.ask("load", { stream, group: "shared", batch_size: 7 });
  await refused(stream, { group: "shared" }, { group: "shared", batch_size: 7, rank: [0, 1] }, GroupKindMismatch);
  await python(stream, { group: "ranked", rank: [0, 2], most: 1 });
  await refused(
    stream,
    { group: "ranked", rank: undefined, worldSize: undefined },
    { group: "ranked", batch_size: 7 },
    GroupKindMismatch,
  );
  const five = { group: "ranked", batch_size: 5, rank: [0, 2] };
  await refused(stream, { group: "ranked", batchSize: 5, worldSize: 2 }, five, GroupKindMismatch);
  const rank = startMember("python", {
    stream,
    group: "busy",
    batch_size: 7,
    rank: [1, 2],
    url: peer.url,
    pause_s: 60,
  });
  await rank.until(({ given }) => given.length > 0);
  const three = { group: "busy", batch_size: 7, rank: [0, 3] };
  await refused(stream, { group: "busy", worldSize: 3, leaseMs: 1000 }, { ...three, lease_s: 1 }, GroupBusy);
  const said = [];
  const ranked = begin(stream, { group: "ranked", worldSize: 3, notify: (line) => said.push(line) });
  assert.equal((await collect(ranked)).length, 2); // the two ranks have left
  assert.match(said[0], /^epoch 0 ended here, and ranks 1, 2 of the 3 ranks of group 'ranked' did not come: 2\/3/);
});

test("an epoch without a sample waits for no rank", async () => {
  const stream = "empty";
  const writer = await openWriter(stream, { spec: { x: ["int64", []] }, url: peer.url });
  await (await writer.epoch(0, { sizes: [40] })).abandon();
  const epoch = await writer.epoch(1, { sizes: [6] });
  const shard = await epoch.shard(0);
  for (let number = 0n; number < 6n; number++) await shard.write({ x: number });
  await shard.close();
  await epoch.close();
  await writer.close();
  const said = [];
  const loader = begin(stream, { batchSize: 2, worldSize: 3, notify: (line) => said.push(line) });
  assert.equal((await collect(loader)).length, 1);
  assert.deepEqual(
    said.filter((line) => line.includes("did not come")).map((line) => line.slice(0, 19)),
    ["epoch 1 ended here,"],
  );
});

test("options that cannot be meant are refused", async () => {
  for (const wrong of [
    { worldSize: 0 },
    { rank: -1 },
    { rank: 2, worldSize: 2 },
    { rank: undefined },
    { member: "a" },
  ]) {
    assert.throws(() => begin("fixed", wrong), BadOption, JSON.stringify(wrong));
  }
  assert.throws(() => begin("fixed", { rank: undefined, worldSize: undefined, dropLast: true }), BadOption);
  await assert.rejects(collect(begin("fixed", { group: "large", batchSize: 10_000_000 })), (error) => {
    assert.ok(error instanceof TooLarge);
    assert.match(
      error.message,
      /^a step of 10000000 samples is 230 MB, which with the blocks around it \(3 of up to .*\) takes/,
    );
    return true;
  });
});

test("an epoch with no whole step gives no batch and says so, where the last step is dropped", async () => {
  const said = [];
  await peer.ask("produce", { stream: "little", spec: "fixed", sizes: [5], epochs: 1 });
  await client.hSet("penstock:{little}:meta", "final", "1");
  const loader = begin("little", { dropLast: true, notify: (line) => said.push(line) });
  await assert.rejects(collect(loader), /has read epoch 0 of 'little'/);
  assert.match(said[0], /^epoch 0 of 'little' gave no batch: its 5 samples do not fill one step of 7, and dropLast/);
});

test("an epoch is read while it is written, and a feed across its epochs", async () => {
  const stream = "written";
  const loader = begin(stream, { group: "early", rank: 1, worldSize: 2, batchSize: 3 });
  const reading = collect(loader);
  await peer.ask("produce", {
    stream,
    spec: "fixed",
    sizes: [40, 50],
    block_bytes: 100,
    partitions: 2,
    pause_s: 0.002,
  });
  const late = await python(stream, { rank: [1, 2], batch_size: 3 });
  assert.deepEqual(await reading, late.batches);
  const feed = begin("fed", { batchSize: 4 });
  const found = [];
  const writing = peer.ask("feed", { stream: "fed", samples: 10 });
  for await (const batch of feed) {
    found.push([...batch.identities()]);
    if (names(found).length === 10) await writing.then(() => peer.ask("feed", { stream: "fed", samples: 10 }));
    if (names(found).length === 20) break;
  }
  assert.deepEqual(names(found), [...all([10], 0), ...all([10], 1)]);
  await feed.checkpoint();
  await feed.close();
  await isClean("fed");
});

test("shards without sizes that are written at once have no order", async () => {
  await peer.ask("open_shards", { stream: "unsized", url: peer.url });
  await assert.rejects(collect(begin("unsized")), (error) => {
    assert.ok(error instanceof OrderNeedsSizes);
    assert.match(error.message, /^epoch 0 of 'unsized' is written in 2 shards at once and has no sizes/);
    return true;
  });
});

test("what cannot be read is left out for every rank, and what was removed is named", async () => {
  const stream = "bad";
  await peer.ask("produce", { stream, ...STREAMS.segments, holes: [], payload: `segments:${folder}/bad` });
  const root = join(folder, "bad");
  const own = readdirSync(root).find((name) => name.startsWith(`${stream}.`));
  const [segment] = readdirSync(join(root, own)).filter((name) => name.endsWith(".seg"));
  const path = join(root, own, segment);
  writeFileSync(path, "");
  const here = begin(stream, { group: "node", rank: 0, worldSize: 2 });
  const found = await collect(here);
  // Python's other rank skips what the first one made a dead letter
  const { batches } = await python(stream, { group: "node", rank: [1, 2] });
  assert.equal(found.length, batches.length);
  const alone = [];
  for (const rank of [0, 1]) alone.push((await python(stream, { group: "python", rank: [rank, 2] })).batches);
  assert.deepEqual([found, batches], alone);
  const dead = await keyOf(stream, "dead:node");
  assert.deepEqual(
    Object.keys(await client.hGetAll(dead)),
    Object.keys(await client.hGetAll(dead.replace("node", "python"))),
  );

  await peer.ask("produce", { stream: "removed", spec: "fixed", sizes: [40], block_bytes: 200 });
  const entries = await keyOf("removed", "entries");
  const [, , third] = await client.xRange(entries, "-", "+");
  await client.xDel(entries, third.id);
  await assert.rejects(collect(begin("removed")), (error) => {
    assert.ok(error instanceof EpochIncomplete);
    assert.match(
      error.message,
      /are in the index and not in the stream, though group 'node' has not acknowledged them/,
    );
    return true;
  });
});

test("a rank is alive while its step takes long, and gone a moment after its process was killed", async () => {
  await peer.ask("produce", { stream: "alive", spec: "fixed", sizes: [40], block_bytes: 200 });
  const given = { stream: "alive", group: "g", batch_size: 7, url: peer.url, rank: [0, 2], pause_s: 60, lease_s: 1 };
  const rank = startMember("node", given);
  await rank.until(({ given }) => given.length > 0);
  await new Promise((resolve) => setTimeout(resolve, 2000)); // longer than a rank may be unseen
  const three = { stream: "alive", group: "g", batch_size: 7, rank: [1, 3], lease_s: 1 };
  await assert.rejects(peer.ask("load", three), /is read by 2 ranks, of which rank-0 are alive/);
  await rank.kill();
  const { batches } = await peer.ask("load", three);
  assert.equal(batches.length, 2);
});

test("of two processes with one rank the older one stops", async () => {
  await peer.ask("produce", { stream: "twice", spec: "fixed", sizes: [400], block_bytes: 200 });
  const older = begin("twice", { leaseMs: 300 });
  const loop = older[Symbol.asyncIterator]();
  await loop.next();
  await begin("twice", { leaseMs: 300 }).open();
  await assert.rejects(async () => {
    while (!(await loop.next()).done) await new Promise((resolve) => setTimeout(resolve, 20));
  }, MemberReplaced);
});

test("connections that break again and again change nothing", async () => {
  await peer.ask("produce", { stream: "broken", spec: "fixed", sizes: [200, 200], block_bytes: 250, partitions: 2 });
  const loader = begin("broken", { prefetchBytes: 2000, batchSize: 5 });
  const found = [];
  for await (const batch of loader) {
    found.push([...batch.identities()]);
    if (found.length % 8 === 0) await client.sendCommand(["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
  }
  assert.deepEqual(names(found), all([200, 200]));
  assert.deepEqual(repeated(names(found)), []);
  await loader.close();
  await isClean("broken");
});

/** Gives the last entry of a shard another id, as a writer does that sends it again after a failover lost it. */
const SEND_AGAIN = `
local records = redis.call('XRANGE', KEYS[2], '-', '+')
local fields = records[#records][2]
for i = 1, #fields, 2 do
  if fields[i] == 'e' then
    local entry = redis.call('XRANGE', KEYS[1], fields[i + 1], fields[i + 1])[1]
    redis.call('XDEL', KEYS[1], fields[i + 1])
    fields[i + 1] = redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
  end
end
redis.call('DEL', KEYS[2])
for _, record in ipairs(records) do redis.call('XADD', KEYS[2], record[1], unpack(record[2])) end
`;

test("a rank reads records again whose entries a failover lost and the writer sends again", async () => {
  const stream = "sent-again";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [80], block_bytes: 250 });
  const found = [];
  for await (const batch of begin(stream, { prefetchBytes: 400 })) {
    if (found.length === 0) {
      const keys = [await keyOf(stream, "entries"), await keyOf(stream, "0:index")];
      await client.eval(SEND_AGAIN, { keys });
    }
    found.push(told(batch));
  }
  assert.deepEqual(ids(found), all([80]));
});

test("a rank that the first roster has lost joins again", async () => {
  const stream = "place-lost";
  await peer.ask("produce", { stream, spec: "fixed", sizes: [40, 40], block_bytes: 250, partitions: 2 });
  const [tag] = JSON.parse(await client.hGet(`penstock:{${stream}}:meta`, "tags"));
  const roster = `penstock:{${stream}.${tag}}:roster`;
  const found = [];
  for await (const batch of begin(stream)) {
    if (found.length === 1) await client.hDel(roster, ["g:node", "m:node:rank-0"]);
    found.push(told(batch));
  }
  assert.deepEqual(ids(found), all([40, 40]));
  assert.equal(await client.hGet(roster, "d:node:0"), "1");
});

for (const number of [0, 1]) {
  test(`ranks go on where the roster of partition ${number} is of before their number changed`, async (context) => {
    const [stream, sizes, directory] = [`older-${number}`, [80, 80], join(folder, `older-${number}`)];
    const [url, port] = await peer.ask("start_server", { directory });
    await peer.ask("produce", { stream, spec: "fixed", sizes, block_bytes: 250, partitions: 2, url });
    const given = { stream, group: "node", batch_size: 7, url, rank: [0, 1], pause_s: 60, lease_s: 1 };
    const older = startMember("node", given);
    await older.until((one) => one.given.length > 0);
    await older.kill();
    const control = createClient({ url }).on("error", () => {});
    context.after(() => control.destroy());
    await control.connect();
    const tag = JSON.parse(await control.hGet(`penstock:{${stream}}:meta`, "tags"))[number];
    const restore = await slotState(control, `${stream}.${tag}`);
    const ranks = [0, 1].map((rank) => begin(stream, { rank, worldSize: 2, url, leaseMs: 3000, prefetchBytes: 400 }));
    const loops = ranks.map((rank) => rank[Symbol.asyncIterator]());
    const found = await Promise.all(loops.map(async (loop) => told((await loop.next()).value)));
    await restore({ isLast: true });
    await peer.ask("kill_server");
    await peer.ask("start_server", { directory, port });
    await Promise.all(
      loops.map(async (loop) => {
        for await (const batch of loop) found.push(told(batch));
      }),
    );
    assert.deepEqual([...new Set(ids(found))].sort(), all(sizes).sort());
    const roster = `penstock:{${stream}.${tag}}:roster`;
    const world = async () => JSON.parse(await control.hGet(roster, "g:node")).world;
    for (const until = Date.now() + 30_000; (await world()) !== 2 && Date.now() < until; ) {
      await new Promise((resolve) => setTimeout(resolve, 100)); // a heartbeat joins again
    }
    assert.equal(await world(), 2);
    assert.equal(await control.hGet(roster, "d:node:0"), "1");
    await peer.ask("kill_server");
  });
}
