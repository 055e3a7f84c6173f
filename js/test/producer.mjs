// A producer in a process of its own, which the tests kill. It writes planned shards, and goes on where they end.
import { openWriter } from "../dist/index.js";
import { sampleOf } from "./samples.mjs";

const { url, stream, spec, sizes, holes = [], ...options } = JSON.parse(process.argv[2]);

const writer = await openWriter(stream, { url, spec, blockBytes: 400, ...options });
const epoch = await writer.epoch(0, { sizes });
for (const [number, size] of sizes.entries()) {
  const shard = await epoch.shard(number);
  while (shard.position < size) {
    const offset = shard.position;
    if (holes.includes(offset)) await shard.quarantine("made bad on purpose");
    else await shard.write(sampleOf(spec, 1000 * number + offset));
    process.stdout.write(`${number} ${offset}\n`);
  }
  await shard.close();
}
await writer.close();
process.stdout.write("done\n");
