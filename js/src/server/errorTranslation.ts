// Translates errors of Redis clients and of sockets into Penstock's errors: one line with what was found and what to do
// (login, ACL, TLS).

import { DamagedKey, PenstockError, ReplyError, ServerUnavailable, Unauthorized } from "../errors.js";
import { SILENT } from "./connection.js";

const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|MOVED|ASK|TRYAGAIN|BUSY|UNBLOCKED|MISCONF|NOREPLICAS)\b/;
const NO_LOGIN = /^(NOAUTH|WRONGPASS)\b/;
/** The words of Redis and of Valkey 9.1 for NOPERM inside a script. */
const NOPERM = /^NOPERM\b|The user executing the script can't (?:run|access)|ACL failure in script/;
/** What scripts and commands say where another program changed a key. */
const DAMAGED = /WRONGTYPE|value is not an integer|Expected value but found|Invalid stream ID|comparison/;
const NO_TLS = /wrong.version.number|packet.length/i;
const CLIENT_CERTIFICATE = /alert.certificate.required|handshake.failure/i;
const UNTRUSTED = /CERT|UNABLE_TO_/;
const NOBODY = /ECONNREFUSED|ENOTFOUND|EAI_AGAIN|EHOSTUNREACH|ENETUNREACH|ENOENT/;

/**
 * Return an error of a client, or an error in the answer of EXEC, as one of this package.
 *
 * @param where The server's address with the user and without the password. A client of the caller has none.
 */
export function translated(error: Error, args: readonly (string | number | Buffer)[], where = "the server"): Error {
  if (error instanceof PenstockError || error instanceof TypeError) return error;
  const { message } = error;
  if (!isReply(error)) return unreachable(error, where);
  const key = args.find((one) => typeof one === "string" && one.startsWith("penstock:"));
  if (NO_LOGIN.test(message) || NOPERM.test(message))
    return new Unauthorized(refused(message, where), { cause: error });
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

/** Return the error of a connection that was not made, or that broke. Waiting does not make a certificate a trusted one. */
function unreachable(error: Error & { readonly code?: string; readonly reason?: string }, where: string): Error {
  const text = error.reason ?? /SSL routines:[^:]*:([^:]+)/.exec(error.message)?.[1] ?? error.message;
  const kind = `${error.code ?? ""} ${error.message}`;
  const away = (told: string, isFinal = false) => new ServerUnavailable(told, { cause: error, isFinal });
  if (!hasAddress(where)) return away(`the server is away: ${text}`);
  const isTls = /^(rediss|valkeys)\b/.test(where);
  if (isTls && NO_TLS.test(kind)) {
    return away(`no TLS is spoken at ${where} (${text}): write redis:// if the server has none`, true);
  }
  if (isTls && CLIENT_CERTIFICATE.test(kind)) {
    const options = "?ssl_certfile=FILE&ssl_keyfile=FILE";
    return away(`${at(where)} asks for a client certificate (${text}): name it with ${options} in the URL`, true);
  }
  if (isTls && UNTRUSTED.test(kind)) {
    const fix = kind.includes("ALTNAME")
      ? "write a host that the certificate names; ?ssl_check_hostname=false in the URL takes any"
      : "name its CA with ?ssl_ca_certs=FILE in the URL";
    return away(`the certificate shown at ${where} is not trusted (${text}): ${fix}`, true);
  }
  if (error.message === SILENT) {
    const hint = isTls ? ", or without TLS (then write redis://)" : "";
    return away(`${at(where)} does not answer: is it stopped, overloaded, behind a firewall${hint}?`);
  }
  if (NOBODY.test(kind)) {
    return away(`no Redis answers at ${where} (${text}): start one with \`penstock server\`, or set PENSTOCK_URL`);
  }
  return away(`${at(where)} is away: ${text}`);
}

/** Return what a user may not do, who that is, and what to do. */
function refused(message: string, where: string): string {
  if (NO_LOGIN.test(message)) {
    return (
      `${at(where)} refused the login (${message}): put user and password into the URL, as in ` +
      "redis://user:password@host:6379. For a server that `penstock server` started here, " +
      'export PENSTOCK_URL="$(penstock server --print-url)"'
    );
  }
  const named = /:\/\/([^@/]+)@/.exec(where)?.[1];
  const name = hasAddress(where) ? decodeURIComponent(named ?? "default") : "USER";
  const command = /run the '([\w.|-]+)' command/.exec(message)?.[1];
  const rule = command === undefined ? "~penstock:*" : `+${command}`;
  const line = message.startsWith("NOPERM") ? `, such as \`ACL SETUSER ${name} ${rule}\`` : "";
  return (
    `${at(where)} refused a command of ${name === "USER" ? "this user" : `user '${name}'`} (${message}): as an ` +
    `administrator, extend the user's ACL${line}. docs/acl.md has a whole line for each role`
  );
}

function hasAddress(where: string): boolean {
  return where.includes("://");
}

function at(where: string): string {
  if (!hasAddress(where)) return where;
  return where.includes("+sentinel:") ? `the primary of ${where}` : `Redis at ${where}`;
}
