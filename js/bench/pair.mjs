// A producer and a trainer in Node, for `python -m benchmarks.node`: `process.send` in both serializations, and a stream.
import { fork } from "node:child_process";
import { once } from "node:events";
import { load, openWriter } from "../dist/index.js";

const JSON_SEND = "process.send, json";
const STREAM = "a stream";
const FLOATS = 37_632; // 150,528 bytes
const POOL = 64;
const BATCH = 64;
const IN_FLIGHT = 8;

const { url, way, samples, stream } = JSON.parse(process.argv[2]);

async function produce() {
  const pool = Array.from({ length: POOL }, (_, n) =>
    Float32Array.from({ length: FLOATS }, (_, at) => Math.sin(n + at)),
  );
  if (way === STREAM) {
    const spec = { x: ["float32", [FLOATS]] };
    const budgetBytes = 2 * samples * 4 * FLOATS + 2 ** 26;
    const writer = await openWriter(stream, { url, spec, budgetBytes, notify: () => {} });
    const epoch = await writer.epoch();
    for (let n = 0; n < samples; n += 1) await epoch.write({ x: pool[n % POOL] });
    await epoch.close();
    await writer.close();
  } else {
    const sent = [];
    for (let n = 0; n < samples; n += 1) {
      const x = pool[n % POOL];
      sent.push(new Promise((resolve) => process.send({ x: way === JSON_SEND ? Array.from(x) : x }, resolve)));
      if (sent.length >= IN_FLIGHT) await sent.shift();
    }
    await Promise.all(sent);
  }
  process.disconnect();
}

async function train() {
  const serialization = way === JSON_SEND ? "json" : "advanced";
  const child = fork(process.argv[1], [process.argv[2], "producer"], { serialization });
  let [began, first, got, check] = [0, 0, 0, 0];
  const take = (count, values) => {
    got += count;
    for (let at = 0; at < values.length; at += FLOATS) check += values[at];
    if (began === 0) [began, first] = [performance.now(), count];
  };
  if (way === STREAM) {
    const loader = load(stream, { url, group: "trainer", batchSize: BATCH, notify: () => {} });
    for await (const batch of loader) {
      take(batch.size, batch.tensors.x.data);
      batch.release();
    }
    await loader.close();
  } else {
    child.on("message", ({ x }) => take(1, way === JSON_SEND ? Float32Array.from(x) : x));
    await once(child, "disconnect");
  }
  const seconds = (performance.now() - began) / 1000;
  console.log(JSON.stringify({ rate: (got - first) / seconds, samples: got, check }));
}

await (process.argv[3] === "producer" ? produce() : train());
