// The committer: appends a shard's blocks exactly once, whatever happens to it or to another run of the same job. It
// waits for quota and for durability, and sends again what a server lost.

import { createHash } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import {
  BudgetFull,
  DamagedKey,
  EpochAbandoned,
  EpochNotFound,
  PenstockError,
  ServerUnavailable,
  ShardMismatch,
} from "../errors.js";
import { type Server, textOf } from "../server/client.js";
import { Durability, touchCommand, unconfirmedNotice } from "../stream/durability.js";
import { type IndexRecord, indexRecords } from "../stream/indexRecords.js";
import { findManifest, liveState } from "../stream/manifest.js";
import { requireThere, type Stream } from "../stream/stream.js";
import { Outage, Wait } from "../waiting.js";
import { encode } from "../wire/encode.js";
import { Admission } from "./admission.js";
import type { PackedBlock } from "./block.js";
import {
  commitCommands,
  isOutOfMemory,
  look,
  lookAndAsk,
  type Progress,
  readCommit,
  type ShardPlace,
  scriptAnswer,
} from "./commitCommands.js";
import { findForged, firstFault, readIndex } from "./completion.js";
import type { WriterContext } from "./context.js";
import { isReleased, openAgain, type UnreplicatedWrites } from "./epochs.js";
import { ANSWER_MS, type Reasons, UnconfirmedBlocks } from "./unconfirmed.js";

const NOTHING = new Durability("memory");
/** Entries that a note names, and notes of one kind in a manifest. More would tell an operator nothing new. */
const MOST_IDS = 256;
const MOST_NOTES = 64;

/** Another writer has the shard, because the server lost the note that this one took it. */
export class ShardTaken extends ShardMismatch {
  override get name(): string {
    return "ShardMismatch";
  }
}

/** A block whose transaction was sent and not yet answered. */
interface SentBlock {
  readonly block: PackedBlock;
  readonly bad: Reasons;
  /** The answers to its transaction, and to the commands for its safety. Null once they were read. */
  answers: Promise<unknown[]> | null;
  /** The answers of the transaction alone. */
  readonly count: number;
  /** The level that is asked for behind it. It has no commands if none is. */
  readonly level: Durability;
  /** Whether the server that it was sent to has to reach a level. */
  readonly mustReach: boolean;
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
  readonly #unconfirmed: UnconfirmedBlocks;
  /** The blocks that this run committed: end to first offset. */
  readonly #own = new Map<number, number>();
  /** The offset after the last sample that the server said to be committed. */
  #answered = 0;
  /** The offset after what earlier runs had committed when this one began. */
  #found = 0;
  #isTaken = false;
  /** The entries that no replica had when the shard was found whole, if its durability is `auto`. */
  unreplicated: UnreplicatedWrites | null = null;
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
    this.#unconfirmed = new UnconfirmedBlocks(this.#durability);
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
    if (token === "") committer.#found = committer.#progress.end;
    return committer;
  }

  /** Return the offset after the last committed one, as last seen. Of another writer's shard: after this one's last. */
  get position(): number {
    return this.#isAnothers ? this.#answered : this.#progress.end;
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
   * @throws ShardMismatch where the server lost samples that it had committed there, and that are not kept.
   */
  async unconfirmed(): Promise<[PackedBlock, Reasons][]> {
    const kept = this.#unconfirmed.all().map(({ block, bad }): [PackedBlock, Reasons] => [block, bad]);
    if (this.#answered > 0) {
      const { partition, manifest, shard } = this.#place;
      for await (const record of indexRecords(this.#control, partition, manifest.epoch, shard)) {
        if (record.writer === this.#token && record.end >= this.#answered) {
          throw this.#notWhole("behind this writer's records is another one");
        }
      }
      if (this.#unconfirmed.first !== 0) throw this.#lost(0, "is not this writer's any more");
    }
    const sent = this.#sent;
    const last = kept.at(-1)?.[0].end ?? 0;
    if (sent !== null && sent.block.end > last) kept.push([sent.block, sent.bad]);
    return kept;
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
    if (this.#unconfirmed.mustWait(block.bytes)) await this.#confirm();
    await this.#send(block, bad);
  }

  /** Return whether the block may be sent before the one ahead of it is answered. */
  async #mayFollow(before: SentBlock, block: PackedBlock): Promise<boolean> {
    const isNext = block.count > 0 && block.first === before.block.end;
    if (this.#unconfirmed.mustWait(before.block.bytes + block.bytes)) return false;
    const held = this.#progress.heldBytes + before.block.bytes;
    return isNext && (await this.#admission.admitNext(block.bytes, held));
  }

  /**
   * Send the block. Where the one before it was refused so is this one, since it does not come next.
   *
   * @returns False where the long way has to be taken: the block before is then committed, or sent again.
   */
  async #follow(before: SentBlock, block: PackedBlock, bad: Reasons): Promise<boolean> {
    const sent = this.#execute(block, bad, await this.#level());
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

  /** Return once everything sent is committed, and is as safe as the stream's durability says. */
  async commitAll(): Promise<void> {
    await this.#drain();
    await this.#confirm();
  }

  async #drain(): Promise<void> {
    while (this.#sent !== null) {
      const sent = this.#sent;
      try {
        if (await this.#collect(sent)) return this.#hasCommitted();
      } catch (error) {
        await this.#reconnect(error);
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
    let records = await this.#wholeIndex(end);
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
    if (fault === "") {
      this.unreplicated = this.#unreplicatedIn(records);
      return;
    }
    await requireThere(this.#control, this.#stream); // a deletion takes the index away, too
    throw this.#notWhole(fault);
  }

  /** Return the records of the shard, after what a failover took is sent again. */
  async #wholeIndex(end: number): Promise<IndexRecord[]> {
    for (;;) {
      try {
        const records = await readIndex(this.#server, this.#place);
        this.#outage.over();
        if (firstFault(records, end, this.#token) === "") return records;
        this.#progress = await look(this.#server, this.#place);
        if (this.#isAnothers || this.#progress.end >= this.#everAnswered) return records;
      } catch (error) {
        await this.#reconnect(error);
      }
      await this.#restore(this.#everAnswered);
      await this.#confirm();
    }
  }

  /** Return the entries that `auto` wrote and no replica confirmed, if there are some. */
  #unreplicatedIn(records: readonly IndexRecord[]): UnreplicatedWrites | null {
    const some = records.filter(({ entryId, end }) => entryId !== "" && end > this.#unconfirmed.confirmed);
    if (!this.#durability.isAuto || some.length === 0) return null;
    const times = some.map(({ entryId }) => Number(entryId.split("-")[0]));
    const { number, roster } = this.#place.partition;
    const [firstMs, lastMs] = [Math.min(...times), Math.max(...times)];
    return { partition: number, firstMs, lastMs, server: this.#server.whereIs(roster) };
  }

  /** The offset after what any run was told to be committed. */
  get #everAnswered(): number {
    return Math.max(this.#answered, this.#found);
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
      await this.#restore(Math.min(block.first, this.#answered));
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
        this.#sent = null;
        return;
      }
      const { first } = rest;
      const reasons = new Map([...bad].filter(([offset]) => offset >= first));
      this.#sent = this.#execute(rest, reasons, await this.#level());
      return;
    }
  }

  async #missingPart(block: PackedBlock): Promise<PackedBlock | null> {
    await this.#requireWritable();
    const { end } = this.#progress;
    if (end < block.first) throw this.#lostBehind(block.first);
    // a broken connection may have committed it unanswered
    if (end > block.first && !this.#wasCut) this.#leftOut.set(block.first, Math.min(end, block.end) - block.first);
    if (end >= block.end) return null;
    return end === block.first ? block : block.tail(end);
  }

  /**
   * Send again what the server has lost, up to an offset, since it said that it was committed.
   *
   * @throws ShardMismatch if it lost more than is kept.
   */
  async #restore(upto: number): Promise<void> {
    let isSaid = false;
    const lost: string[] = [];
    while (this.#progress.end < upto) {
      try {
        if (!isSaid) this.#isTaken = !(await this.#retake()); // the note that this writer has the shard may be lost, too
      } catch (error) {
        await this.#reconnect(error);
        continue;
      }
      await this.#requireWritable();
      const kept = this.#unconfirmed.at(this.#progress.end);
      if (kept === null) throw this.#lostBehind(upto);
      if (!isSaid) {
        isSaid = true;
        this.#context.notify(
          `the server came back without samples ${this.#progress.end}-${upto - 1} of ${this.#name}: sending them again`,
        );
      }
      const entries = [...kept.entries];
      await this.#send(kept.block, kept.bad);
      await this.#drain();
      if (this.#progress.end >= kept.block.end && !this.#isAnothers) lost.push(...entries);
    }
    if (this.#token !== "" && lost.length > 0) await this.#noteSentAgain(lost);
  }

  /** Note that the samples of entries were sent again which the server had confirmed and lost. It ends no writer. */
  async #noteSentAgain(entries: readonly string[]): Promise<void> {
    if (entries.length > MOST_IDS) return;
    const { manifest, shard } = this.#place;
    const ids = JSON.stringify(entries);
    const name = createHash("sha1").update(ids).digest("hex").slice(0, 8);
    const args = [manifest.id, MOST_NOTES, `again:${this.#token}:${shard}:${name}`, ids];
    try {
      await this.#control.run("note_loss", [this.#stream.keys.manifest(manifest.epoch)], args);
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error; // the audit names what a member noted
    }
  }

  #lostBehind(begin: number): ShardMismatch {
    const found = this.#progress.end;
    return this.#lost(found, `is committed up to ${found}, the next block starts at ${begin}`, begin);
  }

  /** Return the error for samples from `first` on that the server confirmed and has lost. */
  #lost(first: number, fault: string, begin = 0): ShardMismatch {
    const end = Math.max(begin, this.#answered);
    const remedy = this.#token === "" ? "abandon the epoch and produce it again" : "write those again that you have";
    const at = new Date().toISOString().slice(0, 19).replace("T", " ");
    return new ShardMismatch(
      `${this.#name} ${fault}: the server lost data, and with it ${end - first} samples that it had confirmed (offsets ` +
        `${first}-${end - 1}, noticed at ${at} UTC, at ${this.#server.whereIs(this.#place.partition.roster)}); ${remedy}`,
    );
  }

  async #requireWritable(): Promise<void> {
    const { manifest } = this.#place;
    if (this.#progress.state === "" && (await this.#isLostHere())) {
      this.#progress = await look(this.#control, this.#place);
    }
    if (this.#progress.state !== liveState(manifest)) await this.#refuseState(this.#progress.state);
    if (this.#isAnothers) throw this.#taken();
  }

  /** Return whether the partition's server alone lost the epoch, which is open there again now. */
  async #isLostHere(): Promise<boolean> {
    const { manifest } = this.#place;
    const found = await findManifest(this.#control, this.#stream, manifest.epoch);
    if (found === null || found.id !== manifest.id || found.state === "abandoned") return false;
    try {
      await openAgain(this.#control, this.#stream, found);
      return true;
    } catch (error) {
      if (error instanceof EpochNotFound) return false; // it is released at this moment
      throw error;
    }
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

  /** Return the level that a write must reach now. */
  #level(): Promise<Durability> {
    return this.#context.replicas.level(this.#durability, this.#place.partition.roster);
  }

  /** Send the block's transaction. */
  #execute(block: PackedBlock, bad: Reasons, level: Durability): SentBlock {
    const { manifest, shard } = this.#place;
    const { checksum } = this.#context;
    const identity = { stream: this.#stream.id, epoch: manifest.epoch, shard, checksum };
    const fields = block.count === 0 ? [] : encode({ ...identity, ...contentsOf(block) });
    const commands = commitCommands(this.#place, block, fields, bad, this.#token);
    const mustReach = !level.isNothing;
    const asked = mustReach && this.#unconfirmed.isDue(block.bytes) ? level : NOTHING;
    const answers = this.#server.sequence([...commands, ...asked.commands(ANSWER_MS)]);
    return { block, bad, answers, count: commands.length, level: asked, mustReach };
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
    this.#answered = Math.max(this.#answered, progress.end);
    this.#own.set(sent.block.end, sent.block.first);
    await this.#keep(sent, entryIdOf(sent, replies));
    this.#noteSafety(sent.level, progress.end, safety);
    return true;
  }

  /** Keep a committed block until it is as safe as the durability says. */
  async #keep({ block, bad, mustReach }: SentBlock, entryId: string): Promise<void> {
    let isKept = mustReach;
    if (this.#durability.isAuto) {
      // another server may have taken it by now; a replica that comes, or comes back, may take its place without it
      await this.#level();
      isKept ||= this.#context.replicas.mayBeReplaced(this.#place.partition.roster);
    }
    this.#unconfirmed.committed(block, bad, isKept, entryId);
  }

  /** Take the answers to the question behind an offset. Returns what is missing, or "". */
  #noteSafety(level: Durability, end: number, safety: readonly unknown[]): string {
    const lacking = level.shortfall(safety);
    if (safety.length > 0) this.#unconfirmed.answered(end, lacking === "");
    return lacking;
  }

  async #awaitAdmission(bytes: number): Promise<void> {
    const { notify, roomWaitMs, stallDetector } = this.#context;
    try {
      while (!(await this.#admission.admit(bytes, this.#progress.heldBytes))) {
        this.#wait ??= new Wait(notify, null, stallDetector);
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
    this.#unconfirmed.cameBack(this.#progress.end);
  }

  /** Return once what is committed is as safe as the stream's durability says. `auto` waits for a limited time. */
  async #confirm(): Promise<void> {
    const { notify, replicas } = this.#context;
    const { roster } = this.#place.partition;
    const wait = new Wait(notify, null);
    for (;;) {
      let lacking: string;
      try {
        await this.#restore(this.#everAnswered);
        const level = await this.#level();
        const { end } = this.#progress;
        if (level.isNothing || this.#unconfirmed.confirmed >= end) return;
        // the connection may have written nothing yet, and WAIT would say nothing then; and another server may answer
        const asked = [touchCommand(roster), ...level.commands()];
        const [progress, [touched, ...safety]] = await lookAndAsk(this.#server, this.#place, asked);
        if (touched instanceof Error) throw touched;
        this.#progress = progress;
        if (progress.end < end) continue;
        lacking = this.#noteSafety(level, end, safety);
        this.#outage.over();
      } catch (error) {
        await this.#reconnect(error);
        continue;
      }
      if (lacking === "" || (await this.#durability.bear(wait, lacking))) continue;
      replicas.lost(roster);
      notify(unconfirmedNotice(this.#stream.name, this.#server.whereIs(roster)));
    }
  }
}

/** Return the id of the entry that a block's transaction appended, or "". */
function entryIdOf({ block }: SentBlock, replies: readonly unknown[]): string {
  const outcome = replies.at(-1);
  return block.count > 0 && Array.isArray(outcome) ? (textOf(outcome[0]) ?? "") : "";
}

function contentsOf({ spec, first, count, holes, columns }: PackedBlock) {
  return { spec, first, count, holes, columns };
}
