// The memory of servers: whether the streams' budgets fit maxmemory, the default budget, and how much of the memory a
// writer may take.

import { BudgetRefused, ServerUnsuitable } from "../errors.js";
import { readableBytes } from "../printable.js";
import { type Server, textOf } from "../server/client.js";
import { integer, readable } from "../stream/damage.js";
import { listStreams } from "../stream/directory.js";
import { StreamKeys } from "../stream/keys.js";
import { type Notify, now } from "../waiting.js";
import { BLOCK_BYTES, BUDGET_BYTES } from "./streamCreation.js";

/** The memory that writers keep free for acknowledgements, joining groups and job queues. */
const RESERVE_SHARE = 0.1;
const RESERVE_BYTES = 16 * 2 ** 20;
const LEAST_BUDGET_BYTES = 4 * BLOCK_BYTES;
const REMOVE = "remove a stream that nobody needs (`penstock inspect` lists them, `penstock delete NAME`)";

/** The memory that a server reports. */
export interface ServerMemory {
  readonly usedBytes: number;
  /** The maxmemory, or 0 for none. */
  readonly limitBytes: number;
  readonly policy: string;
  /** The bytes that writers may still take: below 0 if others took of the reserve, null without a limit. */
  readonly leftBytes: number | null;
}

/** Ask for the memory of the server. Several are as many as the fullest one, because keys spread evenly. */
export async function readMemory(server: Server): Promise<ServerMemory> {
  const told = await server.onEach(memoryOf);
  const usedBytes = Math.max(...told.map((one) => one.usedBytes)) * told.length;
  const limitBytes = Math.min(...told.map((one) => one.limitBytes)) * told.length;
  const policy = told.map((one) => one.policy).find(mayEvict) ?? (told[0]?.policy as string);
  return { usedBytes, limitBytes, policy, leftBytes: limitBytes > 0 ? usable(limitBytes) - usedBytes : null };
}

function mayEvict(policy: string): boolean {
  return policy !== "noeviction" && !policy.startsWith("volatile-");
}

async function memoryOf(server: Server): Promise<Omit<ServerMemory, "leftBytes">> {
  const text = textOf(await server.call("INFO", "memory")) ?? "";
  const fields = new Map(text.split(/\r?\n/).map((line) => line.split(":", 2) as [string, string]));
  const usedBytes = Number(fields.get("used_memory") ?? 0);
  const limitBytes = Number(fields.get("maxmemory") ?? 0);
  return { usedBytes, limitBytes, policy: fields.get("maxmemory_policy") ?? "noeviction" };
}

function usable(limitBytes: number): number {
  return Math.floor(limitBytes * (1 - RESERVE_SHARE)) - RESERVE_BYTES;
}

/**
 * Check that the server can carry a stream, and choose the budget of a new one.
 *
 * @returns The budget, or undefined for that of the existing stream, or the default.
 * @throws ServerUnsuitable if the server may evict samples, BudgetRefused if all budgets do not fit its memory.
 */
export async function admitStream(
  server: Server,
  name: string,
  budgetBytes: number | undefined,
  notify: Notify,
): Promise<number | undefined> {
  const { limitBytes: limit, policy } = await readMemory(server);
  if (mayEvict(policy)) {
    throw new ServerUnsuitable(
      `the server's maxmemory-policy is ${policy}, which may delete samples unread: set it with ` +
        '`redis-cli -u "$PENSTOCK_URL" CONFIG SET maxmemory-policy noeviction`, or where the server is managed',
    );
  }
  if (limit === 0) return budgetBytes;
  const stored = await storedBudget(server, name);
  const others = await budgetOfOthers(server, name);
  if (budgetBytes !== undefined || stored !== null) {
    requireRoom(name, budgetBytes ?? (stored as number), others, limit);
    return budgetBytes;
  }
  const left = usable(limit) - others;
  if (others > 0 && left < LEAST_BUDGET_BYTES) {
    throw new BudgetRefused(
      `no memory for stream '${name}': the other streams' budgets take ${readableBytes(others)} of the ` +
        `${readableBytes(usable(limit))} that streams may have of the server's maxmemory ${readableBytes(limit)}: ` +
        `${REMOVE}, give one of them less by budgetBytes, or raise maxmemory`,
    );
  }
  const chosen = Math.max(LEAST_BUDGET_BYTES, Math.min(BUDGET_BYTES, Math.floor(left / 2)));
  requireRoom(name, chosen, others, limit);
  if (chosen < BUDGET_BYTES) {
    notify(
      `stream '${name}' takes a budget of ${readableBytes(chosen)}, half of what the other streams leave of the ` +
        `server's maxmemory ${readableBytes(limit)}; budgetBytes sets another`,
    );
  }
  return chosen;
}

async function budgetOfOthers(server: Server, name: string): Promise<number> {
  let sum = 0;
  for (const other of await listStreams(server)) {
    if (other !== name) sum += (await storedBudget(server, other).catch(() => null)) ?? 0; // a damaged one is left out
  }
  return sum;
}

/** Return the budget that a stream takes of the server's memory, or null if there is none. Segments take none. */
async function storedBudget(server: Server, name: string): Promise<number | null> {
  const { meta } = new StreamKeys(name);
  const reply = (await server.call("HMGET", meta, "id", "budget_bytes", "payload")) as unknown[];
  const [id, budget, payload] = reply.map(textOf);
  if (id === null) return null;
  return readable(meta, () => ((payload ?? "inline") === "inline" ? integer(budget) : 0));
}

function requireRoom(name: string, budgetBytes: number, others: number, limit: number): void {
  const room = usable(limit);
  if (budgetBytes + others <= room) return;
  const left = room - others;
  const ways = left > 0 ? [`give a budget of at most ${readableBytes(left)}`] : [];
  ways.push("raise maxmemory", ...(others > 0 ? [REMOVE] : []));
  throw new BudgetRefused(
    `stream '${name}' has a budget of ${readableBytes(budgetBytes)}, the other streams ${readableBytes(others)}; the ` +
      `server's maxmemory ${readableBytes(limit)} leaves space for ${readableBytes(Math.max(room, 0))} in all: ` +
      ways.join(", or "),
  );
}

/** The longest time between two questions. Others may fill the server, or set its maxmemory, at any time. */
const ASK_EVERY_MS = 1000;
/** The share of the memory left after which the server is asked again, because several writers share that memory. */
const ASK_SHARE = 1 / 8;

/** The part of the server's memory that one writer may take. So no write meets the maxmemory. */
export class ServerMemoryQuota {
  readonly #server: Server;
  #askedAt = Number.NEGATIVE_INFINITY;
  #spent = 0;
  /** The answer to the last question, or null before the first. */
  memory: ServerMemory | null = null;

  constructor(server: Server) {
    this.#server = server;
  }

  /**
   * Return how many more bytes writers may write, or null without a limit. Below 0 the server holds too much already.
   *
   * @param isAnew Ask the server, however recent its last answer is.
   */
  async leftBytes(wantedBytes: number, isAnew: boolean): Promise<number | null> {
    const left = this.memory?.leftBytes ?? null;
    const isNear = left !== null && this.#spent + wantedBytes > left * ASK_SHARE;
    const { leftBytes } =
      isAnew || isNear || this.memory === null || now() - this.#askedAt >= ASK_EVERY_MS
        ? await this.#ask()
        : this.memory;
    return leftBytes === null ? null : leftBytes - this.#spent;
  }

  /** Ask the server, and return whether it is at its maxmemory. It then refuses every write. */
  async isUsedUp(): Promise<boolean> {
    const { usedBytes, limitBytes } = await this.#ask();
    return limitBytes > 0 && limitBytes <= usedBytes;
  }

  /** Count bytes that were written since the server was asked. */
  spend(bytes: number): void {
    this.#spent += bytes;
  }

  async #ask(): Promise<ServerMemory> {
    this.memory = await readMemory(this.#server);
    this.#askedAt = now();
    this.#spent = 0;
    return this.memory;
  }
}
