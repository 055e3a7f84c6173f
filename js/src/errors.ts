// The errors that a user of the package can meet, one class per cause, with the names of Python's `penstock.errors`.

import { printable } from "./printable.js";

/**
 * The errors of this package. Each has the name, and the meaning, of a Python error in `penstock.errors`. A message may
 * quote names and words of a server, which must not control a terminal.
 */
export class PenstockError extends Error {
  constructor(message = "", options?: ErrorOptions) {
    super(printable(message), options);
  }

  override get name(): string {
    return this.constructor.name;
  }
}

/** A stream, group or member name that cannot be part of a key. */
export class BadName extends PenstockError {}

/** A spec is not allowed: a tensor's name, dtype or shape. */
export class BadSpec extends PenstockError {}

/** An option has a value that is not allowed. */
export class BadOption extends PenstockError {}

/** An entry cannot be decoded. A subclass says more. Nothing of such an entry may be used. */
export class BadEntry extends PenstockError {}

/** A later version of Penstock wrote the entry. */
export class UnsupportedVersion extends BadEntry {}

/** No commit of Penstock wrote the entry, or its index record was lost. */
export class UncommittedEntry extends BadEntry {}

/** The payload of an entry differs from the checksum in its header. */
export class ChecksumMismatch extends BadEntry {}

/** The segment file of an entry is gone, cut short, or used again. */
export class SegmentGone extends BadEntry {}

/** This process cannot read the folder of a stream's segments, or another user could replace it. */
export class SegmentsUnseen extends PenstockError {}

/** A tensor differs from the stream's spec. */
export class SpecMismatch extends PenstockError {}

/** A sample or an entry exceeds the limits of the wire format. */
export class TooLarge extends PenstockError {}

/** A tensor of TF.js does not hold an integer of the stream exactly. */
export class TensorRange extends PenstockError {}

/** The server has no stream of this name. */
export class StreamNotFound extends PenstockError {}

/** The stream was deleted, or the server lost its data. */
export class StreamDeleted extends StreamNotFound {}

/** A key holds something that Penstock did not write. */
export class DamagedKey extends PenstockError {}

/** The stream has no such epoch. */
export class EpochNotFound extends PenstockError {}

/** The epoch is not produced yet, or samples of it are missing. */
export class EpochIncomplete extends PenstockError {}

/** The epoch was abandoned: it takes no more samples. */
export class EpochAbandoned extends PenstockError {}

/** A shard got more, fewer or other samples than its manifest plans, or is another writer's. */
export class ShardMismatch extends PenstockError {}

/** The stream exists with other settings. */
export class StreamConflict extends PenstockError {}

/** The server's settings cannot keep the stream's promises. */
export class ServerUnsuitable extends PenstockError {}

/** The budgets of the streams do not fit the server's memory. */
export class BudgetRefused extends PenstockError {}

/** A writer waited for space longer than it may. What it committed stands. */
export class BudgetFull extends PenstockError {}

/** Entries of the epoch were removed during its replay, or the replay's lease lapsed. */
export class ReplayTruncated extends PenstockError {}

/** The first entries of an epoch cannot be read. Nothing of them was given up. */
export class TooManyDeadLetters extends PenstockError {}

/** The group is not on the stream's roster. */
export class GroupNotFound extends PenstockError {}

/** The group has read every epoch that the stream will have, or begins behind the last one. */
export class GroupFinished extends PenstockError {}

/** The group has live members, so it cannot be reset, or change its number of ranks, now. */
export class GroupBusy extends PenstockError {}

/** The group was made for another way of reading, or for another batch size. */
export class GroupKindMismatch extends PenstockError {}

/** The group had stopped holding data, and epochs that it had not read were released. */
export class EpochsReleased extends PenstockError {}

/** Canonical order is not known yet: the epoch has no sizes, and more than one shard is being written. */
export class OrderNeedsSizes extends PenstockError {}

/** Another process took this member's name. This one must stop. */
export class MemberReplaced extends PenstockError {}

/** A wait took longer than its limit. The text says what was waited for. */
export class WaitTimeout extends PenstockError {}

/** A saved state belongs to another stream, epoch or order. */
export class StateMismatch extends PenstockError {}

/** The server is away, or refuses commands for a time. */
export class ServerUnavailable extends PenstockError {
  /** Whether the server said so itself. Otherwise the connection broke, or there was none. */
  readonly isSaid: boolean;
  /** Whether it lasts until the address is another one. It is not waited for. */
  readonly isFinal: boolean;

  constructor(
    message: string,
    { isSaid = false, isFinal = false, ...options }: ErrorOptions & { isSaid?: boolean; isFinal?: boolean } = {},
  ) {
    super(message, options);
    this.isSaid = isSaid;
    this.isFinal = isFinal;
  }
}

/** The server refuses this user. */
export class Unauthorized extends PenstockError {}

/** The server answered a command with an error that has no class of its own. */
export class ReplyError extends PenstockError {}
