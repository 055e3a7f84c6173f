// The options of a loader that reads through a gateway: their defaults and checks, the credits, and the message that
// joins the group.

import { BadOption } from "../errors.js";
import { checkOptions, type OptionNames } from "../options.js";
import { checkedName } from "../stream/keys.js";
import { type Notify, toStderr } from "../waiting.js";
import { whole } from "../whole.js";

const CREDITS = 2;
const MOST_CREDITS = 16;

/** A WebSocket as browsers have it. */
export interface SocketLike {
  binaryType: string;
  onopen: ((event: never) => unknown) | null;
  onmessage: ((event: never) => unknown) | null;
  onclose: ((event: never) => unknown) | null;
  onerror: ((event: never) => unknown) | null;
  send(text: string): void;
  close(code?: number, reason?: string): void;
}

/** How a group is joined and read through `penstock gateway`. */
export interface GatewayOptions {
  /** The gateway's address, such as `wss://data.example.org`. */
  readonly url: string;
  /** The token of the group. */
  readonly token: string;
  /** The group's name. */
  readonly group: string;
  /** The samples of a batch. */
  readonly batchSize: number;
  /** The batches that may be on their way, or wait for the loop. Default 2, at most 16. */
  readonly credits?: number;
  /** When a batch counts as trained on: when the loop asks for the next one, or when `ack()` is called. Default 'next'. */
  readonly acknowledge?: "next" | "manual";
  /** The longest wait for a batch or an epoch. Default no limit, and 60 s for a stream, a first epoch or a lost gateway. */
  readonly timeoutMs?: number;
  /** Compare each payload with its checksum. Default true. */
  readonly checksum?: boolean;
  /** Takes each line for the user. Default stderr, or the console of a browser. */
  readonly notify?: Notify;
  /** The class of WebSockets. Default that of the browser, or of Node from 22. */
  readonly WebSocket?: new (
    url: string,
  ) => SocketLike;
}

const OPTIONS = {
  url: true,
  token: true,
  group: true,
  batchSize: true,
  credits: true,
  acknowledge: true,
  timeoutMs: true,
  checksum: true,
  notify: true,
  WebSocket: true,
} satisfies OptionNames<GatewayOptions>;

/** The options of a reader of a gateway, checked. */
export interface ChosenGateway {
  readonly url: string;
  readonly open: Record<string, unknown>;
  readonly credits: number;
  readonly acknowledge: "next" | "manual";
  readonly timeoutMs: number | null;
  readonly checksum: boolean;
  readonly notify: Notify;
  readonly WebSocket: new (url: string) => SocketLike;
}

/** Return the options with their defaults. Raises BadOption, BadName. */
export function chosenGateway(stream: string, options: GatewayOptions): ChosenGateway {
  const needed = '{ url: "wss://data.example.org", token, group: "resnet", batchSize: 64 }';
  checkOptions("load through a gateway", options, OPTIONS, needed);
  const { acknowledge = "next", credits = CREDITS, token } = options;
  if (acknowledge !== "next" && acknowledge !== "manual") {
    throw new BadOption(`acknowledge is '${String(acknowledge)}', expected 'next' or 'manual'`);
  }
  if (typeof token !== "string" || token === "") {
    throw new BadOption("token is missing: `penstock gateway` prints the token of a group");
  }
  if (whole("credits", credits, 1) > MOST_CREDITS) {
    throw new BadOption(`credits is ${credits}, expected 1 to ${MOST_CREDITS} batches`);
  }
  const found = options.WebSocket ?? (globalThis as { WebSocket?: ChosenGateway["WebSocket"] }).WebSocket;
  if (found === undefined) {
    throw new BadOption("Node has WebSocket from version 22 on: pass that of the package `ws` as the option WebSocket");
  }
  const names = { stream: checkedName("stream", stream), group: checkedName("group", options.group) };
  return {
    url: addressOf(options.url),
    open: { type: "open", token, ...names, batch_size: whole("batchSize", options.batchSize, 1) },
    credits,
    acknowledge,
    timeoutMs: options.timeoutMs === undefined ? null : whole("timeoutMs", options.timeoutMs, 1),
    checksum: options.checksum ?? true,
    notify: options.notify ?? toStderr,
    WebSocket: found,
  };
}

function addressOf(url: string): string {
  const found = /^(ws|wss|http|https):\/\/[^/?#]+/.exec(url);
  if (found === null) {
    throw new BadOption(`url is '${url}', expected the address of a gateway, such as ws://localhost:8466`);
  }
  return `${found[0].replace(/^http/, "ws")}/v1/read`;
}
