// Addresses of servers: URLs of one server, a Unix socket, a cluster or a Sentinel service, with login, database and
// TLS options.

import { readFileSync } from "node:fs";
import { BadOption } from "../errors.js";

const PORT = 6379;
const SENTINEL_PORT = 26_379;
const FORMS =
  "write redis://host:6379/0, rediss://host:6379/0, unix:///path?db=0, redis://host:6379,host:6379 for a cluster, or " +
  "redis+sentinel://host:26379,host:26379/service/0";
/** The part of an address that has a login before an @, and the hosts. */
const PARTS = /^([a-z+]+:\/\/)(.*@)?([^/?#@]*)(.*)$/s;

/** Where a server is, and how a connection to it begins. */
export interface Address {
  readonly socket: {
    readonly [option: string]: unknown;
    readonly host?: string;
    readonly port?: number;
    readonly path?: string;
  };
  readonly isTls: boolean;
  readonly login: readonly (readonly string[])[];
}

/** A service and the Sentinels that know its primary. */
export interface Service {
  readonly name: string;
  /** The Sentinels, with a login of their own. */
  readonly sentinels: readonly Address[];
  /** A server of the service, at the first Sentinel's host and port. */
  readonly server: Address;
}

/** Return the hosts of an address, of which several are of one cluster. Raises BadOption. */
export function parseAddresses(text: string): readonly [Address, ...Address[]] {
  const [, scheme, login = "", hosts = "", rest] = PARTS.exec(text) ?? [];
  if (scheme === undefined || scheme === "unix://") return [parseAddress(text)];
  return hosts.split(",").map((host) => parseAddress(`${scheme}${login}${host}${rest}`)) as [Address, ...Address[]];
}

/** Return whether an address names Sentinels. */
export function isOfSentinels(text: string): boolean {
  return /^rediss?\+sentinel:/.test(text);
}

/** Return the service of an address that `isOfSentinels` accepts. Raises BadOption. */
export function parseService(text: string): Service {
  const [, scheme = "", login = "", hosts = "", rest = ""] = PARTS.exec(text) ?? [];
  const [, name, behind = ""] = /^\/([^/?#]+)(.*)$/s.exec(rest) ?? [];
  if (name === undefined) throw notAnAddress();
  const plainScheme = scheme.replace("+sentinel", "");
  const query = behind.includes("?") ? behind.slice(behind.indexOf("?")) : "";
  const own = new URLSearchParams(query);
  const [user, password] = [own.get("sentinel_username") ?? "", own.get("sentinel_password") ?? ""];
  const ownLogin = password === "" ? "" : `${encodeURIComponent(user)}:${encodeURIComponent(password)}@`;
  const sentinels = hosts.split(",").map((host) => {
    const whole = /:\d+$/.test(host) ? host : `${host}:${SENTINEL_PORT}`;
    return parseAddress(`${plainScheme}${ownLogin}${whole}${query}`);
  });
  const server = parseAddress(`${plainScheme}${login}${hosts.split(",")[0]}${behind.replace(/^\/(?=\?|$)/, "")}`);
  return { name: plain(name), sentinels, server };
}

/** Return the same address with another host and port. */
export function at(address: Address, host: string, port: number): Address {
  return { ...address, socket: { ...address.socket, host, port } };
}

/** Return where an address is, in words for people: without its login. */
export function whereIs({ socket: { host = "", port, path }, isTls }: Address): string {
  if (path !== undefined) return `unix://${path}`;
  return `redis${isTls ? "s" : ""}://${host.includes(":") ? `[${host}]` : host}:${port}`;
}

/** Return the text of an address without password and options. The user is named. */
export function withoutPassword(text: string): string {
  const [, scheme, login = "", hosts, rest = ""] = PARTS.exec(text) ?? [];
  const [, user = "default"] = /^([^:@]+):/.exec(login) ?? [];
  return scheme === undefined
    ? "the server"
    : `${scheme}${user === "default" ? "" : `${user}@`}${hosts}${rest.replace(/[?#].*$/s, "")}`;
}

function parseAddress(text: string): Address {
  const whole = text.replace(/^(unix:\/\/[^/]*@)\//, "$1localhost/"); // URL wants a host behind a user
  const url = URL.canParse(whole) ? new URL(whole) : null;
  const scheme = url?.protocol.replace("valkey", "redis");
  const isUnix = scheme === "unix:";
  if (url === null || !(isUnix || scheme === "redis:" || scheme === "rediss:")) throw notAnAddress();
  const { searchParams } = url;
  const [username, password, path] = [plain(url.username), plain(url.password), plain(url.pathname)];
  const database = searchParams.get("db") ?? (isUnix ? "" : path.replace(/^\/+|\/+$/g, ""));
  if (!/^\d*$/.test(database)) throw notAnAddress(` (the database is a number, found '${database}')`);
  const login: string[][] = [];
  if (password !== "") login.push(username === "" ? ["AUTH", password] : ["AUTH", username, password]);
  if (database !== "" && database !== "0") login.push(["SELECT", database]);
  if (isUnix) return { socket: { path }, isTls: false, login };
  const host = url.hostname.replace(/^\[|\]$/g, "") || "localhost";
  const isTls = scheme === "rediss:";
  const port = Number(url.port || PORT);
  return { socket: { ...(isTls && tlsOptions(searchParams)), host, port }, isTls, login };
}

function notAnAddress(why = ""): BadOption {
  return new BadOption(`\`url\` is no address${why}: ${FORMS}`);
}

/** The texts that redis-py takes for no. */
const NO = /^(0|f|false|n|no)$/i;

/** Return the options of TLS. Their names in the address are those of redis-py. */
function tlsOptions(given: URLSearchParams): object {
  const file = (name: string) => (given.has(name) ? readFileSync(given.get(name) as string) : undefined);
  return {
    ca: file("ssl_ca_certs"),
    cert: file("ssl_certfile"),
    key: file("ssl_keyfile"),
    rejectUnauthorized: given.get("ssl_cert_reqs") !== "none",
    ...(NO.test(given.get("ssl_check_hostname") ?? "") && { checkServerIdentity: () => undefined }),
  };
}

function plain(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    throw new BadOption("`url` has a % that begins no character: write it as %25");
  }
}
