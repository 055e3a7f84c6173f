// Connects to an address: finds out whether one server, a cluster or a Sentinel answers, and refuses an address that
// does not fit it.

import { PenstockError, ServerUnavailable, ServerUnsuitable } from "../errors.js";
import { type Address, isOfSentinels, parseAddresses, parseService, whereIs, withoutPassword } from "./address.js";
import { Cluster } from "./cluster.js";
import { Connection } from "./connection.js";
import { translated } from "./errorTranslation.js";
import { ErrorReply } from "./resp.js";
import { SentinelClient } from "./sentinel.js";
import type { Transport } from "./transport.js";

/**
 * Connect to what answers at an address: one server, a cluster, of which one node is enough, or the primary of a service.
 *
 * @throws BadOption, ServerUnavailable, Unauthorized, or ServerUnsuitable before anything is written.
 */
export async function connect(url: string): Promise<Transport> {
  if (isOfSentinels(url)) return await connectToService(url);
  const addresses = parseAddresses(url);
  for (const [number, address] of addresses.entries()) {
    const own = new Connection(address);
    try {
      const mode = await greet(own, address, withoutPassword(url));
      if (mode !== "cluster") {
        if (addresses.length > 1) throw notACluster(address);
        return own;
      }
      own.destroy();
      return await Cluster.open(addresses);
    } catch (error) {
      own.destroy();
      if (!(error instanceof ServerUnavailable) || number + 1 === addresses.length) throw error;
    }
  }
  throw new PenstockError("an address has a host");
}

async function connectToService(url: string): Promise<Transport> {
  const client = new SentinelClient(parseService(url));
  try {
    await ping(client);
    return client;
  } catch (error) {
    client.destroy();
    throw translated(error as Error, [], withoutPassword(url));
  }
}

/** Return the mode of the server once it has let this client in. */
async function greet(own: Connection, address: Address, where: string): Promise<string> {
  try {
    const [, mode] = await Promise.all([ping(own), modeOf(own)]);
    if (mode === "sentinel") throw aSentinel(address);
    if (mode === "cluster" && address.socket.path !== undefined) throw socketOfCluster(address);
    return mode;
  } catch (error) {
    const failure = translated(error as Error, [], where);
    if (!(error instanceof ErrorReply) || failure instanceof ServerUnavailable) throw failure;
    const mode = await modeBehindRefusal(address);
    if (mode === "sentinel") throw aSentinel(address);
    if (mode === "cluster" && selects(address)) throw hasDatabase(address);
    throw failure;
  }
}

/** Send a PING. A server that cannot write its disk refuses that one, too, and still answers reads. */
async function ping(client: Transport): Promise<void> {
  try {
    await client.sendCommand(["PING"]);
  } catch (error) {
    if (!(error instanceof ErrorReply) || !error.message.startsWith("MISCONF")) throw error;
  }
}

/** Return the mode that the answer to HELLO names, or "" for a server that does not answer it. */
async function modeOf(connection: Connection): Promise<string> {
  const answer = await connection.sendCommand(["HELLO"]).catch((error) => {
    if (error instanceof ErrorReply) return null;
    throw error;
  });
  const words = Array.isArray(answer) ? answer.map(String) : [];
  const at = words.indexOf("mode");
  return at < 0 ? "" : (words[at + 1] as string);
}

/** Return the mode of a server that refused the login or the database: a Sentinel has none, a cluster only database 0. */
async function modeBehindRefusal(address: Address): Promise<string> {
  for (const login of [address.login.filter(([name]) => name !== "SELECT"), []]) {
    const probe = new Connection({ ...address, login });
    const mode = await modeOf(probe).catch(() => "");
    probe.destroy();
    if (mode !== "") return mode;
  }
  return "";
}

function selects({ login }: Address): boolean {
  return login.some(([name]) => name === "SELECT");
}

function aSentinel(address: Address): ServerUnsuitable {
  return new ServerUnsuitable(
    `a Sentinel answers at ${whereIs(address)}, which keeps no data: write redis+sentinel://host:port/service, where ` +
      "`SENTINEL MASTERS` names the services",
  );
}

function hasDatabase(address: Address): ServerUnsuitable {
  return new ServerUnsuitable(
    `a cluster answers at ${whereIs(address)}, which has database 0 only: leave out the number behind the host`,
  );
}

function notACluster(address: Address): ServerUnsuitable {
  return new ServerUnsuitable(
    `the server at ${whereIs(address)} is not a node of a cluster, and only a cluster has several hosts: write the one ` +
      "server, as in redis://host:6379, or redis+sentinel:// for a service that Sentinels watch",
  );
}

function socketOfCluster(address: Address): ServerUnsuitable {
  return new ServerUnsuitable(
    `a node of a cluster answers at ${whereIs(address)}: write redis://host:port of any node`,
  );
}
