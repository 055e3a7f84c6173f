// Makes a module of the compiled checksum, because a browser has no file system to read it from.
import { readFileSync, rmSync, writeFileSync } from "node:fs";

const compiled = new URL("../dist/wire/xxh3.wasm", import.meta.url);
const text = readFileSync(compiled).toString("base64");
writeFileSync(new URL("../dist/wire/xxh3Wasm.js", import.meta.url), `export const XXH3 = "${text}";\n`);
rmSync(compiled);
