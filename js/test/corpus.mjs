// The golden corpus, as tests read it.
import { readdirSync, readFileSync } from "node:fs";

const GOLDEN = new URL("../../tests/golden/", import.meta.url);

/** The cases of a folder. `spec` is the text of the spec, because a JavaScript object loses the order of digits. */
export function cases(folder) {
  const files = readdirSync(new URL(folder, GOLDEN)).filter((name) => name.endsWith(".json"));
  return files.map((file) => {
    const text = readFileSync(new URL(`${folder}/${file}`, GOLDEN), "utf8");
    return { ...JSON.parse(text), spec: /"spec": (\{.*\}),?\n/.exec(text)[1] };
  });
}

/** The fields as a server sends them. A pad of `shift` bytes in front changes how the values are aligned. */
export function fieldsOf(found, shift = 0) {
  return found.fields.map(([name, hex]) => {
    const bytes = Buffer.concat([Buffer.alloc(shift), Buffer.from(hex, "hex")]);
    return [Buffer.from(name), bytes.subarray(shift)];
  });
}

const metaOf = ({ fields }) => Buffer.from(fields[0]?.[1] ?? "", "hex").toString("latin1");

/** Whether a tensor of the entry is compressed, which this package's writer does not do. */
export const isCompressed = (found) => metaOf(found).includes('"compression"');

/** Whether a tensor of the entry is compressed with Blosc2, which this package does not read. */
export const usesBlosc2 = (found) => isCompressed(found) && metaOf(found).includes('"blosc2"');

/** The bytes of a typed array in hexadecimal. */
export const hexOf = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("hex");
