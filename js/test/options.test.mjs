// A misspelt option is refused before anything happens. Otherwise a program would run with a default that nobody chose.
import assert from "node:assert/strict";
import { test } from "node:test";
import { BadOption, dataset, decode, load, openWriter, parseSpec, replay } from "../dist/index.js";

const GROUP = { group: "g", batchSize: 64 };
const THROUGH = { ...GROUP, url: "ws://localhost:1", token: "t" };
const EPOCH = { epoch: 0, batchSize: 64 };
const SPEC = parseSpec('{"x": ["uint8", []]}');

const refused = (call, message) =>
  assert.rejects(
    async () => call(),
    (error) => {
      assert.ok(error instanceof BadOption, error);
      assert.match(error.message, message);
      return true;
    },
  );

test("an option that a function does not have is named, with the near one", async () => {
  await refused(() => load("s", { ...GROUP, startt: 1 }), /^load has no option 'startt' \(did you mean 'start'\?\)/);
  await refused(() => load("s", { ...GROUP, ack: "manual" }), /no option 'ack': its options are group, .*acknowledge/);
  await refused(() => load("s", { ...THROUGH, leaseMs: 5 }), /^load through a gateway has no option 'leaseMs'/);
  await refused(() => load("s", { ...THROUGH, token: undefined, tokens: "t" }), /'tokens' \(did you mean 'token'\?\)/);
  await refused(
    () => replay("s", { ...EPOCH, suffle: 7 }),
    /^replay has no option 'suffle' \(did you mean 'shuffle'\?\)/,
  );
  await refused(
    () => openWriter("s", { budget: 1, budget_bytes: 1, retension: "budget", partition: 2 }),
    /'budgetBytes'\?\), .*'budgetBytes'\?\), .*'retention'\?\), .*'partitions'\?\)/,
  );
  await refused(() => openWriter("s", { compression: "zstd" }), /^openWriter has no option 'compression': its options/);
  await refused(() => dataset({}, {}, { xs: "x", bachSize: 1 }), /^dataset has no option .*'batchSize'\?\)/);
  await refused(
    () => dataset({}, {}, { xs: "x", batchSize: 1, shuffle: { windo: 5, seed: 1 } }),
    /^shuffle of dataset has no option 'windo' \(did you mean 'window'\?\)/,
  );
  await refused(() => decode([], SPEC, { checkSum: false }), /^decode has no option .*'checksum'\?\)/);
});

test("a call without its options says which it needs", async () => {
  await refused(
    () => replay("s"),
    /options of replay are undefined, expected an object: \{ epoch: 0, batchSize: 64 \}/,
  );
  await refused(() => load("s"), /options of load are undefined, expected an object: \{ group: "resnet", batch/);
  await refused(() => openWriter("s", 5), /options of openWriter are 5, expected an object/);
  await refused(() => dataset({}, {}), /expected an object: \{ xs: "x", ys: "y" \}/);
});

test("a text in the place of a number is shown as one", async () => {
  for (const given of [GROUP, THROUGH]) {
    await refused(
      () => load("s", { ...given, batchSize: "64" }),
      /^batchSize is '64', expected an integer of at least 1$/,
    );
  }
  await refused(() => dataset({}, {}, { xs: "x", batchSize: "8" }), /^batchSize is '8', expected an integer/);
});
