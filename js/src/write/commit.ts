import { setTimeout as sleep } from "node:timers/promises";
import { BudgetFull, DamagedKey, EpochAbandoned, ServerUnavailable, ShardMismatch } from "../errors.js";
import type { Server } from "../server/server.js";
import { findManifest, liveState } from "../stream/manifest.js";
import { indexRecords } from "../stream/records.js";
import { requireThere, type Stream } from "../stream/stream.js";
import { Outage, Wait } from "../waiting.js";
import { encode } from "../wire/encode.js";
import { Admission } from "./admission.js";
import type { PackedBlock } from "./block.js";
import { findForged, firstFault, readIndex } from "./completion.js";
import type { WriterContext } from "./context.js";
import { Durability } from "./durability.js";
import { isReleased } from "./epochs.js";
import {
  commitCommands,
  isOutOfMemory,
  look,
  type Progress,
  readCommit,
  type ShardPlace,
  scriptAnswer,
} from "./progress.js";

/** The reason for each hole of a block. */
export type Reasons = ReadonlyMap<number, string>;

/** Another writer has the shard, because the server lost the note that this one took it. */
export class ShardTaken extends ShardMismatch {
  override get name(): string {
    return "ShardMismatch";
  }
}

/** A block, with the reason for each of its holes. */
interface BlockWithReasons {
  readonly block: PackedBlock;
  readonly bad: Reasons;
}

/** A block whose transaction was sent and not yet answered. */
interface SentBlock extends BlockWithReasons {
  /** The answers to its transaction, and to the commands for its safety. Null once they were read. */
  answers: Promise<unknown[]> | null;
  /** The answers of the transaction alone. */
  readonly count: number;
}

/**
 * Appends a shard's blocks exactly once, whatever happens to it or to another run of the same job. One block is being
 * committed while the next is packed and sent. Nothing is sent again without having heard, or looked.
 */
export class Committer {
  readonly #server: Server;
  readonly #control: Server;
  readonly #stream: Stream;
  readonly #place: ShardPlace;
  readonly #context: WriterContext;
  /** The token of a feed's writer. Runs of a planned shard have none, so each goes on where another ended. */
  readonly #token: string;
  readonly #retake: () => Promise<boolean>;
  readonly #admission: Admission;
  readonly #durability: Durability;
  readonly #outage: Outage;
  #progress: Progress = { end: 0, state: "", heldBytes: 0, writer: null };
  #sent: SentBlock | null = null;
  /** The wait for quota. It lasts until a block is committed, even if the server refuses blocks meanwhile. */
  #wait: Wait | null = null;
  /** What is committed and lacks the durability, in words, and the wait for it. */
  #lacking = "";
  #unsafe: Wait | null = null;
  /** The blocks that may lack the durability, in order. A failover may lose them, so they are sent again then. */
  readonly #unsafeBlocks: BlockWithReasons[] = [];
  /** The blocks that this run committed: end to first offset. */
  readonly #own = new Map<number, number>();
  /** The offset after the last sample that the server said to be committed. */
  #confirmed = 0;
  #isTaken = false;
  /** Whether a connection broke. What was committed before this writer sent it may then be its own. */
  #wasCut = false;
  /** First offset of a block to its samples that another run had committed. */
  readonly #leftOut = new Map<number, number>();

  private constructor(context: WriterContext, place: ShardPlace, token: string, retake: () => Promise<boolean>) {
    this.#server = context.server;
    this.#control = context.control;
    this.#stream = context.stream;
    this.#place = place;
    this.#context = context;
    this.#token = token;
    this.#retake = retake;
    this.#admission = new Admission(context.control, context.stream, place, context);
    this.#durability = new Durability(context.stream.durability);
    this.#outage = new Outage(context.notify, "writing");
  }

  /**
   * Begin to append to one shard, after what is committed of it.
   *
   * @param token The token of a feed's writer, or "".
   * @param retake Registers a feed's shard again at a server that may have forgotten it. False if it is another's.
   */
  static async begin(
    context: WriterContext,
    place: ShardPlace,
    token = "",
    retake: () => Promise<boolean> = async () => true,
  ): Promise<Committer> {
    const committer = new Committer(context, place, token, retake);
    try {
      committer.#progress = await look(committer.#server, place);
    } catch (error) {
      await committer.#comeBack(error);
    }
    committer.#lacking = "";
    return committer;
  }

  /** Return the offset after the last committed one, as last seen. Of another writer's shard: after this one's last. */
  get position(): number {
    return this.#isAnothers ? this.#confirmed : this.#progress.end;
  }

  /** Return how many samples were not sent, because another run of the shard had committed their offsets. */
  get leftOut(): number {
    return [...this.#leftOut.values()].reduce((sum, count) => sum + count, 0);
  }

  get #isAnothers(): boolean {
    const { writer } = this.#progress;
    return this.#isTaken || (writer !== null && writer !== this.#token);
  }

  /**
   * Return what was sent to a shard that is another writer's, for this writer's next shard.
   *
   * @throws ShardMismatch where the server had confirmed samples of this writer there.
   */
  async unconfirmed(): Promise<[PackedBlock, Reasons][]> {
    if (this.#confirmed > 0) {
      const { partition, manifest, shard } = this.#place;
      for await (const record of indexRecords(this.#control, partition, manifest.epoch, shard)) {
        if (record.writer === this.#token && record.end >= this.#confirmed) {
          throw this.#notWhole("behind this writer's records is another one");
        }
      }
      throw new ShardMismatch(
        `${this.#name} is not this writer's any more: the server lost data, and with it ${this.#confirmed} samples that ` +
          "it had confirmed; start again, and write what is missing",
      );
    }
    return this.#sent === null ? [] : [[this.#sent.block, this.#sent.bad]];
  }

  get #name(): string {
    const { manifest, shard } = this.#place;
    return `shard ${shard} of epoch ${manifest.epoch} of '${this.#stream.name}'`;
  }

  /**
   * Send the block once what was sent before is committed.
   *
   * @throws EpochAbandoned, ShardMismatch where the shard has lost what was committed, BudgetFull after waiting for space
   *   as long as it may, ServerUnavailable when the server does not come back.
   */
  async commit(block: PackedBlock, bad: Reasons): Promise<void> {
    const before = this.#sent;
    if (before !== null && (await this.#mayFollow(before, block)) && (await this.#follow(before, block, bad))) return;
    await this.#drain();
    await this.#send(block, bad);
  }

  /** Return whether the block may be sent before the one ahead of it is answered. */
  async #mayFollow(before: SentBlock, block: PackedBlock): Promise<boolean> {
    const isNext = block.count > 0 && block.first === before.block.end && this.#lacking === "";
    const held = this.#progress.heldBytes + before.block.bytes;
    return isNext && (await this.#admission.admitNext(block.bytes, held));
  }

  /**
   * Send the block. Where the one before it was refused so is this one, since it does not come next.
   *
   * @returns False where the long way has to be taken: the block before is then committed, or sent again.
   */
  async #follow(before: SentBlock, block: PackedBlock, bad: Reasons): Promise<boolean> {
    const sent = this.#execute(block, bad);
    try {
      // another run may have committed just the one before
      if ((await this.#collect(before)) || (await this.#collect(sent))) {
        this.#hasCommitted();
        this.#sent = sent.answers === null ? null : sent;
        return true;
      }
    } catch (error) {
      before.answers = null; // what is committed is looked at
      this.#wasCut = true; // this block may be committed, too
      await this.#reconnect(error);
    }
    await this.#send(before.block, before.bad);
    return false;
  }

  /** Return once everything sent is committed, and send again what has to be. */
  async commitAll(): Promise<void> {
    await this.#drain();
  }

  async #drain(): Promise<void> {
    for (;;) {
      await this.#drainSent();
      await this.#awaitSafety();
      const lost = this.#unsafeBlocks.find(({ block }) => block.end > this.#progress.end);
      if (lost === undefined) break;
      this.#isTaken = !(await this.#retake());
      await this.#send(lost.block, lost.bad);
    }
    this.#unsafeBlocks.length = 0;
  }

  async #drainSent(): Promise<void> {
    while (this.#sent !== null) {
      const sent = this.#sent;
      try {
        if (await this.#collect(sent)) return this.#hasCommitted();
      } catch (error) {
        await this.#reconnect(error);
      }
      if (this.#unsafeBlocks.length > 0) {
        this.#keep(sent); // the ones before it may be lost, and come first then
        this.#sent = null;
        return;
      }
      await this.#send(sent.block, sent.bad);
    }
  }

  #hasCommitted(): void {
    this.#sent = this.#wait = null;
    this.#outage.over();
  }

  /**
   * Raise unless the shard holds what its writers committed up to `end`. Call it once every commit is answered.
   *
   * @throws ShardMismatch if records were lost or another program wrote them, StreamDeleted if the stream is gone.
   */
  async requireWhole(end: number): Promise<void> {
    let records = await readIndex(this.#control, this.#place);
    if (this.#isAnothers || (records.length > 0 && records.every(({ writer }) => writer !== this.#token))) {
      throw this.#taken();
    }
    const { partition, manifest, shard } = this.#place;
    let fault = firstFault(records, end, this.#token);
    if (fault !== "") {
      records = []; // it may have been repaired since, which is rare
      for await (const one of indexRecords(this.#control, partition, manifest.epoch, shard)) records.push(one);
      fault = firstFault(records, end, this.#token);
    }
    if (fault === "") {
      const others = records.filter((record) => this.#own.get(record.end) !== record.first);
      const forged = await findForged(this.#control, this.#stream, this.#place, others);
      if (forged !== null) fault = `the record ${forged.end}-0 names an entry that is not its own`;
    }
    if (fault === "") return;
    await requireThere(this.#control, this.#stream); // a deletion takes the index away, too
    throw this.#notWhole(fault);
  }

  #notWhole(fault: string): ShardMismatch {
    const { name } = this.#stream;
    return new ShardMismatch(
      `the index of ${this.#name} is not what its writers committed (${fault}): the server lost data, or somebody else ` +
        `wrote there; see \`penstock audit ${name}\`, then abandon the epoch (\`penstock epochs abandon ${name} ` +
        `${this.#place.manifest.epoch}\`) and produce it again`,
    );
  }

  /** Send what of the block is not committed yet, after waiting for space. */
  async #send(block: PackedBlock, bad: Reasons): Promise<void> {
    for (;;) {
      let rest = await this.#missingPart(block);
      if (rest !== null) {
        try {
          await this.#awaitAdmission(rest.bytes);
        } catch (error) {
          await this.#reconnect(error);
          continue;
        }
        rest = await this.#missingPart(block); // another run may have gone on while this one waited
      }
      if (rest === null) {
        if (this.#lacking !== "") this.#keep({ block, bad });
        this.#sent = null;
        return;
      }
      const { first } = rest;
      this.#sent = this.#execute(rest, new Map([...bad].filter(([offset]) => offset >= first)));
      return;
    }
  }

  async #missingPart(block: PackedBlock): Promise<PackedBlock | null> {
    const { end, state } = this.#progress;
    if (state !== liveState(this.#place.manifest)) await this.#refuseState(state);
    if (this.#isAnothers) throw this.#taken();
    if (end < block.first) {
      throw new ShardMismatch(
        `shard ${this.#place.shard} of epoch ${this.#place.manifest.epoch} is committed up to ${end}, the next block ` +
          `starts at ${block.first}: the server lost data; abandon the epoch and produce it again`,
      );
    }
    // a broken connection may have committed it unanswered
    if (end > block.first && !this.#wasCut) this.#leftOut.set(block.first, Math.min(end, block.end) - block.first);
    if (end >= block.end) return null;
    return end === block.first ? block : block.tail(end);
  }

  #taken(): ShardTaken {
    return new ShardTaken(`${this.#name} is another writer's: the server lost data and gave the shard out again`);
  }

  /** Raise the error for an epoch that takes nothing more, or is not the one that it was. */
  async #refuseState(state: string): Promise<never> {
    const { partition, manifest } = this.#place;
    if (state !== "" && !/^(live|abandoned|gone):/.test(state)) {
      throw new DamagedKey(`${partition.state(manifest.epoch)} holds something that Penstock did not write: ${state}`);
    }
    await requireThere(this.#control, this.#stream);
    const [word, id] = state.split(":");
    const name = `epoch ${manifest.epoch} of '${this.#stream.name}'`;
    if (id === manifest.id || !(await this.#isEpochLost())) {
      throw new EpochAbandoned(`${name} takes no more samples (it is ${word || "released"})`);
    }
    const isNew = id === undefined ? "" : "; another one has its number since";
    const Refusal = this.#token === "" ? EpochAbandoned : ShardTaken;
    throw new Refusal(`${name} is gone: the server came back from before it was opened${isNew}; start again`);
  }

  /** Return whether the epoch is neither there nor released. A release takes the manifest last. */
  async #isEpochLost(): Promise<boolean> {
    const { epoch, id } = this.#place.manifest;
    const found = await findManifest(this.#control, this.#stream, epoch);
    return found?.id !== id && !(await isReleased(this.#control, this.#stream, epoch));
  }

  /** Send the block's transaction. */
  #execute(block: PackedBlock, bad: Reasons): SentBlock {
    const { manifest, shard } = this.#place;
    const { checksum } = this.#context;
    const identity = { stream: this.#stream.id, epoch: manifest.epoch, shard, checksum };
    const fields = block.count === 0 ? [] : encode({ ...identity, ...contentsOf(block) });
    const commands = commitCommands(this.#place, block, fields, bad, this.#token);
    const answers = this.#server.sequence([...commands, ...this.#durability.commands]);
    return { block, bad, answers, count: commands.length };
  }

  /** Read the answers. False where the block has to be sent again: someone else committed, or there is no memory. */
  async #collect(sent: SentBlock): Promise<boolean> {
    const { answers } = sent;
    if (answers === null) return false; // answered before, in vain, and sending it again was interrupted
    sent.answers = null;
    const all = await answers;
    const [replies, safety] = [all.slice(0, sent.count), all.slice(sent.count)];
    if (isOutOfMemory(replies)) {
      this.#admission.noteFullServer();
      return false;
    }
    const [isCommitted, progress] = readCommit(scriptAnswer(replies), sent.block, this.#place, this.#token);
    this.#progress = progress;
    if (!isCommitted) return false;
    this.#confirmed = progress.end;
    this.#own.set(sent.block.end, sent.block.first);
    this.#noteUnsafe(this.#durability.shortfall(safety));
    if (this.#lacking !== "") this.#keep(sent);
    return true;
  }

  async #awaitAdmission(bytes: number): Promise<void> {
    const { notify, roomWaitMs, silence } = this.#context;
    try {
      while (!(await this.#admission.admit(bytes, this.#progress.heldBytes))) {
        this.#wait ??= new Wait(notify, null, silence);
        await this.#wait.because("room", () => this.#admission.why());
        if (roomWaitMs !== null && this.#wait.ms > roomWaitMs) {
          throw new BudgetFull(await this.#admission.why());
        }
        await sleep(this.#admission.pauseMs);
        this.#progress = await look(this.#server, this.#place);
      }
    } finally {
      await this.#admission.endWait();
    }
  }

  async #reconnect(error: unknown): Promise<void> {
    if (!(error instanceof ServerUnavailable)) throw error;
    this.#wasCut = true;
    await this.#comeBack(error);
  }

  /** Look again as soon as the server answers. The outage counts until the next commit. */
  async #comeBack(error: unknown): Promise<void> {
    for (let failure = error; ; ) {
      if (!(failure instanceof ServerUnavailable)) throw failure;
      await this.#outage.bear(failure);
      try {
        this.#progress = await look(this.#server, this.#place);
        this.#isTaken = !(await this.#retake());
        break;
      } catch (again) {
        failure = again;
      }
    }
    // a new connection has written nothing, so its WAIT would say nothing
    if (this.#durability.commands.length > 0) this.#noteUnsafe("the connection broke before the server said so");
  }

  #keep(one: BlockWithReasons): void {
    const isKept = this.#unsafeBlocks.some(({ block }) => block.end === one.block.end);
    if (!isKept) this.#unsafeBlocks.push(one);
  }

  #noteUnsafe(what: string): void {
    if (this.#lacking === "") this.#unsafe = null;
    this.#lacking = what;
  }

  /** Return once what is committed is as safe as the stream's durability says. */
  async #awaitSafety(): Promise<void> {
    while (this.#lacking !== "") {
      this.#unsafe ??= new Wait(this.#context.notify, null);
      await this.#durability.bear(this.#unsafe, this.#lacking);
      await this.#durability.makeSafe(this.#control, this.#stream, this.#context.notify);
      this.#lacking = "";
      try {
        this.#progress = await look(this.#server, this.#place); // another server may have said that it is safe
      } catch (error) {
        await this.#reconnect(error);
      }
    }
  }
}

function contentsOf({ spec, first, count, holes, columns }: PackedBlock) {
  return { spec, first, count, holes, columns };
}
