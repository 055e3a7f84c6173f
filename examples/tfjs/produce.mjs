// Decodes a folder of photos with sharp, once, into the streams that train.mjs reads. Ended at any moment and started
// again, it goes on behind the last samples that it committed.
import { createHash } from "node:crypto";
import { readdirSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";
import { openWriter } from "penstock-js";
import sharp from "sharp";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { shard: { type: "string", default: "512" } }, // the samples of a shard, in which an epoch is planned
});
const [folder = "photos"] = positionals;
const SHARD = Number(values.shard);
const SIDE = 128;
const AT_ONCE = 16; // photos that libvips decodes on its threads meanwhile

const digest = (text) => createHash("sha256").update(text).digest("hex");
const files = readdirSync(folder, { recursive: true }).filter((name) => /\.(jpe?g|webp)$/i.test(name));
const classes = [...new Set(files.map(dirname))].sort();
// mixed, because the classes lie in folders, and in the same order in each run
const mixed = files
  .map((name) => [digest(name), name])
  .sort()
  .map(([, name]) => name);
const parts = {
  "photos.val": mixed.filter((_, at) => at % 10 === 0),
  "photos.train": mixed.filter((_, at) => at % 10 !== 0),
};

async function decode(name) {
  const file = await readFile(join(folder, name)); // given a path, libvips opens a file up to 15 times
  const pixels = sharp(file).resize(SIDE, SIDE, { fit: "fill" }).toColourspace("srgb").removeAlpha();
  return { x: await pixels.raw().toBuffer(), y: classes.indexOf(dirname(name)) };
}

async function produce(stream, names) {
  const sizes = Array.from({ length: Math.ceil(names.length / SHARD) }, (_, at) =>
    Math.min(SHARD, names.length - at * SHARD),
  );
  const spec = { x: ["uint8", [SIDE, SIDE, 3]], y: ["int64", []] };
  const budgetBytes = 2 ** 23 + Math.ceil(1.1 * names.length * SIDE * SIDE * 3); // the whole epoch is kept
  const writer = await openWriter(stream, { spec, info: { classes: { y: classes } }, budgetBytes });
  const epoch = await writer.epoch(0, { sizes, fingerprint: digest(names.join("\n")).slice(0, 16) });
  for (const [number, size] of sizes.entries()) {
    const shard = await epoch.shard(number);
    while (shard.position < size) {
      const from = number * SHARD + shard.position;
      const some = names.slice(from, Math.min(from + AT_ONCE, number * SHARD + size));
      const found = await Promise.allSettled(some.map(decode));
      for (const [at, { value, reason }] of found.entries()) {
        if (value) await shard.write(value);
        else await shard.quarantine(`${some[at]}: ${reason.message}`); // a hole, which readers leave out
      }
    }
    await shard.close();
    console.log(`${stream}: ${number * SHARD + size} of ${names.length}`);
  }
  await writer.close();
}

for (const [stream, names] of Object.entries(parts)) await produce(stream, names);
console.log(`peak memory ${(process.resourceUsage().maxRSS / 1000).toFixed(0)} MB`);
