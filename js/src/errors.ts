/** The errors of this package. Each has the name, and the meaning, of a Python error in `penstock.errors`. */
export class PenstockError extends Error {
  override get name(): string {
    return this.constructor.name;
  }
}

/** A spec is not allowed: a tensor's name, dtype or shape. */
export class BadSpec extends PenstockError {}

/** An entry cannot be decoded. A subclass says more. Nothing of such an entry may be used. */
export class BadEntry extends PenstockError {}

/** A later version of Penstock wrote the entry. */
export class UnsupportedVersion extends BadEntry {}

/** The payload of an entry differs from the checksum in its header. */
export class ChecksumMismatch extends BadEntry {}

/** A tensor differs from the stream's spec. */
export class SpecMismatch extends PenstockError {}

/** A sample or an entry exceeds the limits of the wire format. */
export class TooLarge extends PenstockError {}
