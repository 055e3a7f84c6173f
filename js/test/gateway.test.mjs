// A loader that reads through a gateway does what one does that reads from Redis.
import assert from "node:assert/strict";
import { once } from "node:events";
import { rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import * as tf from "@tensorflow/tfjs";
import * as browser from "../dist/browser.js";
import { BadName, BadOption, GatewayLoader, load, Unauthorized, WaitTimeout } from "../dist/index.js";
import { startGateway } from "./gateways.mjs";
import { all, killAll, names, repeated, startMember } from "./members.mjs";
import { startPeer } from "./peer.mjs";

const SIZES = [40, 40];
const SKIP = typeof WebSocket === "undefined" && "Node has WebSocket from version 22 on";

let peer;

before(async () => {
  peer = await startPeer();
});

after(async () => {
  await killAll();
  await peer.close();
});

const produce = (stream, spec, options) => peer.ask("produce", { stream, spec, sizes: SIZES, ...options });

async function read(loader) {
  const seen = [];
  for await (const batch of loader) seen.push(batch);
  return seen;
}

const identities = (batches) => names(batches.map((batch) => [...batch.identities()]));

/** Write an epoch of `train`, and start a gateway for its group g. */
async function withTrain(use, spec = "fixed", ...more) {
  await produce("train", spec, { block_bytes: 64 });
  const gateway = await startGateway(peer.url, ...more);
  try {
    const { url, token } = gateway;
    const given = { url, token, group: "g", batchSize: 7, notify() {} };
    await use(gateway, (options) => load("train", { ...given, ...options }));
  } finally {
    await gateway.end();
    await peer.ask("remove", { stream: "train", url: peer.url });
  }
}

for (const spec of ["fixed", "digits", "ragged"]) {
  test(`batches of ${spec} tensors are those of a loader of Redis, to the bit`, { skip: SKIP }, () =>
    withTrain(async (_, open) => {
      const loader = open();
      assert.ok(loader instanceof GatewayLoader);
      const { spec: found, member } = await loader.open();
      assert.match(member, /^gateway-/);
      assert.ok(found.length > 0);
      const rows = (await read(loader)).flatMap((batch) => rowsOf(batch));
      await loader.close();
      const direct = load("train", { url: peer.url, group: "direct", batchSize: 7, notify() {} });
      const expected = (await read(direct)).flatMap((batch) => rowsOf(batch));
      await direct.close();
      assert.deepEqual(new Map(rows), new Map(expected));
      assert.equal(rows.length, 80);
    }, spec),
  );
}

/** The samples that the group g has not acknowledged. */
async function left() {
  const [, text] = await peer.ask("audit", { stream: "train" });
  return 80 - Number(/ g +(\d+)/.exec(text)[1]);
}

/** The identity of each row, and its tensors as text. */
function rowsOf(batch) {
  return [...batch.identities()].map((identity, row) => {
    const samples = Object.values(batch.tensors).map((column) => column.sample(row));
    return [identity.join("/"), samples.map(({ shape, data }) => `${shape}:${data}`).join(" ")];
  });
}

test("what is not acknowledged comes again, and what is does not", { skip: SKIP }, () =>
  withTrain(async (_, open) => {
    const first = open({ acknowledge: "manual" });
    const kept = [];
    for await (const batch of first) {
      if (kept.length === 2) break;
      await batch.ack();
      await batch.ack();
      kept.push(batch);
    }
    await first.close();
    const second = open();
    const rest = await read(second);
    await second.close();
    assert.deepEqual(identities([...kept, ...rest]).sort(), all(SIZES).sort());
  }),
);

/** Return the loader's next batch, and end the iteration. */
async function take(loader) {
  for await (const batch of loader) return batch;
}

test("ack tells whether the server has it, also behind the end of the loader", { skip: SKIP }, () =>
  withTrain(async (gateway, open) => {
    const lines = [];
    const loader = open({ acknowledge: "manual", notify: (line) => lines.push(line) });
    const [first, second] = [await take(loader), await take(loader)];
    assert.deepEqual([await first.ack(), await first.ack()], [true, true]);
    await loader.close();
    assert.equal(await first.ack(), true);
    await assert.rejects(
      second.ack(),
      new RegExp(`^PenstockError: this loader of 'train' was closed before ${second.size} samples were acknowledged`),
    );
    assert.deepEqual(lines, [`${second.size} samples were handed out and not acknowledged: they are handed out again`]);
    assert.equal(await left(), 80 - first.size);
    const broken = open({ acknowledge: "manual", notify: (line) => lines.push(line) });
    const third = await take(broken);
    await gateway.kill();
    assert.deepEqual([await third.ack(), await third.ack()], [false, false]);
    assert.match(lines.at(-1), new RegExp(`^the connection broke before ${third.size} samples were acknowledged`));
    await broken.close();
    assert.equal(await left(), 80 - first.size);
  }),
);

test("batches that waited on a dead connection are not given to the loop, as they come again", { skip: SKIP }, () =>
  withTrain(async (gateway, open) => {
    const file = join(tmpdir(), `penstock-tokens-${process.pid}`);
    writeFileSync(file, `train/g ${gateway.token}\n`, { mode: 0o600 });
    const loader = open({ acknowledge: "manual", credits: 4 });
    const seen = [];
    const answers = [];
    let next;
    for await (const batch of loader) {
      seen.push(batch);
      if (seen.length === 2) await sleep(500); // until others wait for the loop
      answers.push(await batch.ack());
      if (seen.length !== 2) continue;
      await gateway.end();
      next = await startGateway(peer.url, "--port", new URL(gateway.url).port, "--tokens", file);
    }
    await loader.close();
    await next.end();
    rmSync(file);
    assert.deepEqual(identities(seen).sort(), all(SIZES).sort());
    assert.deepEqual([...new Set(answers)], [true]);
  }),
);

test("of two loops over one loader the later one goes on", { skip: SKIP }, () =>
  withTrain(async (_, open) => {
    const loader = open();
    const older = loader[Symbol.asyncIterator]();
    const first = (await older.next()).value;
    const rest = [];
    for await (const batch of loader) {
      rest.push(batch);
      if (rest.length === 1) await assert.rejects(older.next(), /^PenstockError: this loader .* read by another loop/);
    }
    await loader.close();
    assert.deepEqual(identities([first, ...rest]).sort(), all(SIZES).sort());
  }),
);

test("a loader that lost its gateway goes on with the next one", { skip: SKIP }, () =>
  withTrain(
    async (gateway, open) => {
      const port = new URL(gateway.url).port;
      const lines = [];
      const file = join(tmpdir(), `penstock-tokens-${process.pid}`);
      writeFileSync(file, `train/g ${gateway.token}\n`, { mode: 0o600 });
      const loader = open({ notify: (line) => lines.push(line) });
      const seen = [];
      let next;
      for await (const batch of loader) {
        seen.push(batch);
        if (seen.length !== 3) continue;
        await batch.ack();
        await gateway.kill();
        next = await startGateway(peer.url, "--lease", "1", "--port", port, "--tokens", file);
      }
      await loader.close();
      await next.end();
      rmSync(file);
      assert.deepEqual([...new Set(identities(seen))].sort(), all(SIZES).sort());
      assert.deepEqual(repeated(identities(seen.slice(0, 3))), []);
      assert.ok(
        lines.some((line) => line.includes("the connection broke while reading")),
        lines.join("\n"),
      );
    },
    "fixed",
    "--lease",
    "1",
  ),
);

test("timeoutMs ends a wait for an epoch, and the loader reads the next one", { skip: SKIP }, () =>
  withTrain(async (_, begin) => {
    const loader = begin({ timeoutMs: 4000 });
    assert.equal((await read(loader)).length, 12);
    const began = performance.now();
    await assert.rejects(read(loader), (error) => {
      assert.ok(error instanceof WaitTimeout, error);
      assert.match(error.message, /^gave up after 4 s: group 'g' has read epoch 0 of 'train'/);
      return true;
    });
    assert.ok(performance.now() - began < 8000);
    await produce("train", "fixed", {});
    assert.equal((await read(loader)).length, 12);
    await loader.close();
  }),
);

test("timeoutMs ends the wait for a gateway that does not answer", { skip: SKIP }, async () => {
  const silent = createServer();
  silent.listen(0, "127.0.0.1");
  await once(silent, "listening");
  const url = `ws://127.0.0.1:${silent.address().port}`;
  const loader = load("train", { url, token: "t", group: "g", batchSize: 1, timeoutMs: 200 });
  await Promise.all([1, 2].map(() => assert.rejects(loader.open(), /^WaitTimeout: gave up .*ws:.* sends nothing$/)));
  await loader.close();
  silent.close();
});

test("TF.js trains on a gateway's batches, and acknowledges behind its steps", { skip: SKIP }, () =>
  withTrain(async (_, open) => {
    await tf.setBackend("cpu");
    const data = open({ acknowledge: "manual" }).dataset(tf, { xs: "x", ys: "y" });
    const model = tf.sequential({ layers: [tf.layers.dense({ units: 1, inputShape: [2] })] });
    model.compile({ loss: "meanSquaredError", optimizer: "sgd" });
    await model.fitDataset(data, { epochs: 1, verbose: 0, callbacks: data.callback });
    data.throwIfFailed();
    await data.close();
    assert.equal(await left(), 0);
  }, "numbers"),
);

test("an evaluation acknowledges nothing until it is asked to", { skip: SKIP }, () =>
  withTrain(async (_, open) => {
    await tf.setBackend("cpu");
    const data = open({ acknowledge: "manual" }).dataset(tf, { xs: "x", ys: "y" });
    const model = tf.sequential({ layers: [tf.layers.dense({ units: 1, inputShape: [2] })] });
    model.compile({ loss: "meanSquaredError", optimizer: "sgd" });
    await model.evaluateDataset(data.prefetch(2), {});
    assert.equal(await left(), 80);
    assert.equal(await data.acknowledge(), true);
    assert.equal(await left(), 0);
    await data.close();
    await assert.rejects(data.acknowledge(), BadOption);
  }, "numbers"),
);

test("a group of a gateway's client and two Python members loses nothing when one is killed", { skip: SKIP }, () =>
  withTrain(async (_, open) => {
    const options = { stream: "train", url: peer.url, group: "g", batch_size: 4, prefetch_bytes: 64 };
    const members = ["python", "python"].map((language, at) => startMember(language, { ...options, member: `p${at}` }));
    await Promise.all(members.map((member) => member.until(({ given }) => given.length > 0)));
    const loader = open({ acknowledge: "manual", batchSize: 4 });
    const acknowledged = [];
    for await (const batch of loader) {
      if (acknowledged.length === 2) break;
      await batch.ack();
      acknowledged.push(batch);
    }
    await members[0].kill();
    await loader.close();
    await members[1].ended;
    const last = open();
    const rest = [];
    while ((await left()) > 0) rest.push(...(await read(last)));
    await last.close();
    const seen = [...identities([...acknowledged, ...rest]), ...members.flatMap((one) => names(one.given))];
    assert.deepEqual([...new Set(seen)].sort(), all(SIZES).sort());
  }),
);

test("what is wrong is an error of this package, with the gateway's sentence", { skip: SKIP }, () =>
  withTrain(async (_, begin) => {
    const open = (options) => begin(options).open();
    await assert.rejects(
      open({ token: "wrong" }),
      (error) => error instanceof Unauthorized && /token/.test(error.message),
    );
    await assert.rejects(open({ group: "other" }), BadOption);
    assert.throws(() => load("train", { url: "redis://x", token: "t", group: "g", batchSize: 1 }), BadOption);
    assert.throws(() => begin({ token: "" }), BadOption);
    assert.throws(() => begin({ group: "_g" }), BadName);
    assert.equal(browser.BadName, BadName);
    assert.throws(() => begin({ credits: 17 }), BadOption);
  }),
);
