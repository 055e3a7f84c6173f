// The Node sides of `python -m benchmarks.node`: replays an epoch for each line that it reads.
import { createInterface } from "node:readline";
import { createClient } from "@redis/client";
import { replay } from "../dist/index.js";

const { url, stream, batch: batchSize, side } = JSON.parse(process.argv[2]);
const client = side === "Node, @redis/client" ? createClient({ url, RESP: 2 }) : undefined;
await client?.connect();
const source = replay(stream, { epoch: 0, batchSize, ...(client ? { client } : { url }) });
console.log(JSON.stringify(await source.open().then(({ samples }) => ({ samples }))));
for await (const _ of createInterface({ input: process.stdin })) {
  const began = performance.now();
  let [samples, check] = [0, 0];
  for await (const batch of source) {
    const { data } = batch.tensors.x;
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    for (let at = 0; at < bytes.length; at += bytes.length / batch.size) check += bytes[at];
    samples += batch.size;
    if (side === "Node, release()") batch.release();
  }
  const seconds = (performance.now() - began) / 1000;
  console.log(JSON.stringify({ seconds, samples, check }));
}
await source.close();
client?.destroy();
