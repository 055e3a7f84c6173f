// One trainer of a run in Node, which does what `chaos/trainer.py` does: every sample proved, everything written down in
// a journal. `chaos/node_trainer.py` starts it. It is a member of the npm package that `make js` builds.
import { openSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { load, PenstockError } from "../js/dist/index.js";
import { prove } from "./payload.mjs";

const IDLE_MS = 200;
const TICK_MS = 200;
/** A loop that waits longer acknowledges what it has: several groups may hold all of the little space. */
const HOLD_MS = 3000;

const given = JSON.parse(process.argv[2]);
const file = openSync(given.journal, "a");

/** Append one line, which outlives this process. Its time is of the monotonic clock, as in Python. */
function note(letter, ...words) {
  const line = [letter, process.hrtime.bigint(), ...words].join(" ");
  writeSync(file, `${line.replaceAll("\n", " ")}\n`);
}

/** Note when this process stood still for longer than a quarter of a lease, as on a loaded machine. */
function noteStalls() {
  let last = performance.now();
  setInterval(() => {
    const now = performance.now();
    if (now - last > given.leaseMs / 4) note("S", ((now - last) / 1000).toFixed(3));
    last = now;
  }, TICK_MS).unref();
}

let leave = () => process.exit(0); // before it has joined, there is nothing to leave
process.on("SIGTERM", () => leave());
process.on("SIGUSR1", () => process.stderr.write(`active: ${process.getActiveResourcesInfo().join(", ")}\n`));

/** One member of one group, until it is asked to leave. */
class Trainer {
  #loader;
  #seq = 0;
  #noted = 0;
  /** The batches whose step ended and that are not acknowledged. */
  #owed = [];
  #isWaiting = false;
  #isLeaving = false;

  constructor(loader) {
    this.#loader = loader;
    leave = () => {
      this.#isLeaving = true;
      if (!this.#isWaiting) return;
      note("Z");
      loader.close().catch(() => {}); // closing again at the end meets the same error
    };
  }

  /** Read epoch after epoch. */
  async run() {
    while (!this.#isLeaving) {
      try {
        await this.#iterate();
      } catch (error) {
        if (error.name !== "GroupFinished") throw error;
        await sleep(IDLE_MS);
      }
    }
  }

  async #iterate() {
    const batches = this.#loader[Symbol.asyncIterator]();
    while (!this.#isLeaving) {
      const { value: batch, done } = await this.#next(batches);
      if (done) {
        if (this.#isLeaving) return;
        await this.#settleAll();
        this.#noteAcknowledged();
        return;
      }
      await this.#step(batch);
    }
    // the last step does not count: its batch comes again
    if (given.policy === "manual") await this.#acknowledge(this.#owed.length - 1);
  }

  async #next(batches) {
    const next = batches.next();
    this.#isWaiting = true;
    const settling = setTimeout(() => {
      if (this.#owed.length === 0) return;
      note("O", "it waits, and acknowledges what it has");
      this.#settleAll().catch(() => {}); // the loop meets the same error
    }, HOLD_MS);
    try {
      return await next;
    } finally {
      clearTimeout(settling);
      this.#isWaiting = false;
    }
  }

  async #step(batch) {
    this.#noteAcknowledged();
    this.#seq += 1;
    const { x, y } = batch.tensors;
    const good = [];
    const bad = [];
    for (let row = 0; row < batch.size; row += 1) {
      const nonce = prove(given.seed, x.sample(row).data, y.data[row]);
      if (nonce === null) bad.push(row);
      else good.push(nonce.toString(16));
    }
    note("H", this.#seq, batch.epoch, good.join(",") || "-", batch.position);
    for (const row of bad) note("X", this.#seq, `row ${row} of epoch ${batch.epoch}: y ${y.data[row]}`);
    await sleep(2 * Math.random() * given.stepMs);
    note("D", this.#seq);
    if (given.policy === "on_next") return;
    this.#owed.push([this.#seq, batch]);
    if (given.policy === "manual" && this.#owed.length >= given.together) await this.#settleAll();
    if (given.policy === "on_checkpoint" && this.#owed.length >= given.checkpointEvery) await this.#settleAll();
  }

  async #settleAll() {
    if (given.policy === "manual") await this.#acknowledge(this.#owed.length);
    else if (given.policy === "on_checkpoint") {
      const owed = this.#owed.splice(0);
      await this.#loader.checkpoint();
      for (const [seq] of owed) note("A", seq);
      note("F");
    }
  }

  /** Acknowledge the first batches. When `ack()` has returned, the server has it, which F says. */
  async #acknowledge(count) {
    for (const [seq, batch] of this.#owed.splice(0, Math.max(0, count))) {
      await batch.ack();
      note("A", seq);
      note("F");
    }
  }

  /** Note what a loader has acknowledged by itself: the last batch, after it gave the next one or ended. */
  #noteAcknowledged() {
    if (given.policy !== "on_next" || this.#seq <= this.#noted) return;
    note("A", this.#seq);
    this.#noted = this.#seq;
  }
}

noteStalls();
try {
  const { stream, loader: options } = given;
  const acknowledge = given.policy === "on_next" ? "next" : "manual";
  const loader = load(stream, { ...options, leaseMs: given.leaseMs, acknowledge });
  await loader.open();
  const trainer = new Trainer(loader);
  note("B");
  try {
    await trainer.run();
  } finally {
    note("Z");
    await loader.close();
  }
  note("L");
  process.exit(0);
} catch (error) {
  note("E", error.name, error.message);
  process.stderr.write(`${error.stack}\n`);
  process.exit(error instanceof PenstockError ? 3 : 1);
}
