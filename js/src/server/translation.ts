import { DamagedKey, PenstockError, ReplyError, ServerUnavailable, Unauthorized } from "../errors.js";

const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|MOVED|ASK|TRYAGAIN|BUSY|UNBLOCKED|MISCONF|NOREPLICAS)\b/;
const FORBIDDEN = /^(NOAUTH|WRONGPASS|NOPERM)\b/;
/** What scripts and commands say where another program changed a key. */
const DAMAGED = /WRONGTYPE|value is not an integer|Expected value but found|Invalid stream ID|comparison/;

/** Return an error of a client, or an error in the answer of EXEC, as one of this package. */
export function translated(error: Error, args: readonly (string | number | Buffer)[]): Error {
  if (error instanceof PenstockError || error instanceof TypeError) return error;
  const { message } = error;
  if (!isReply(error)) return new ServerUnavailable(`the server is away: ${message}`, { cause: error });
  const key = args.find((one) => typeof one === "string" && one.startsWith("penstock:"));
  if (FORBIDDEN.test(message)) return new Unauthorized(message, { cause: error });
  if (PASSING.test(message)) return new ServerUnavailable(message, { cause: error, isSaid: true });
  if (DAMAGED.test(message)) {
    return new DamagedKey(`${key ?? "a key"} holds something that Penstock did not write: ${message.slice(0, 200)}`);
  }
  return new ReplyError(message, { cause: error });
}

/** Return whether the server answered with an error, which clients tell by a class of their own. */
function isReply(error: Error): boolean {
  return /^(ErrorReply|SimpleError|BlobError|ReplyError)$/.test(error.name) || /Error(Reply)?$/.test(error.name)
    ? /^[A-Z]{2,}\b/.test(error.message) && !("code" in error && typeof error.code === "string")
    : false;
}
