// The connection of `url` to a real server: logging in, TLS, sockets, and whatever breaks on the way.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { createServer as createTlsServer } from "node:tls";
import { BadOption, load, openWriter, replay, ServerUnavailable, Unauthorized } from "../dist/index.js";
import { parseService } from "../dist/server/address.js";
import { Connection } from "../dist/server/connection.js";
import { SentinelClient } from "../dist/server/sentinel.js";
import { startPeer, told } from "./peer.mjs";

const folder = mkdtempSync(join(tmpdir(), "penstock-js-"));
const open = [];
let peer;
let server;

before(async () => {
  peer = await startPeer();
  server = new URL(peer.url);
  await peer.ask("produce", { stream: "images", spec: "images", sizes: [20, 13] });
  await peer.ask("produce", { stream: "large", spec: "images", sizes: [30], block_bytes: 3_000_000 });
});

after(async () => {
  for (const one of open) one.close();
  await peer.close();
  rmSync(folder, { recursive: true, force: true });
});

/** Listen, and pass connections on to the server. `change` may do something to both sockets. */
async function front(change = () => {}, { listener = createServer(), where = { host: "127.0.0.1", port: 0 } } = {}) {
  const event = "setSecureContext" in listener ? "secureConnection" : "connection";
  listener.on(event, (near) => {
    const far = connect(Number(server.port), "127.0.0.1");
    for (const one of [near, far]) one.on("error", () => {});
    near.on("close", () => far.destroy());
    far.on("close", () => near.destroy());
    near.pipe(far).pipe(near);
    change(near, far);
  });
  listener.listen(where);
  await once(listener, "listening");
  open.push(listener);
  return listener.address().port;
}

/** Return the server's address with some of its parts changed. */
function address(parts) {
  const url = new URL(peer.url);
  for (const [name, value] of Object.entries(parts)) {
    if (name === "query") url.search = new URLSearchParams(value);
    else url[name] = value;
  }
  return url.href.replace(/^redis:/, parts.protocol ?? "redis:");
}

async function collect(options, stream = "images") {
  const source = replay(stream, { epoch: 0, batchSize: 7, url: peer.url, ...options });
  const found = [];
  try {
    for await (const batch of source) found.push(told(batch));
    return found;
  } finally {
    await source.close();
  }
}

async function ask(url, ...commands) {
  const connection = new Connection(url);
  try {
    return await Promise.all(commands.map((words) => connection.sendCommand(words)));
  } finally {
    connection.destroy();
  }
}

test("large values are the bytes that Python reads, pass after pass", async () => {
  for (const stream of ["images", "large"]) {
    const [expected] = await peer.ask("replay", { stream, epoch: 0, batch_size: 7 });
    for (let pass = 0; pass < 2; pass += 1) assert.deepEqual(await collect({}, stream), expected);
  }
});

test("a batch that is released gives its memory to later ones, and nothing else changes", async () => {
  const [expected] = await peer.ask("replay", { stream: "images", epoch: 0, batch_size: 3 });
  const found = [];
  const source = replay("images", { epoch: 0, batchSize: 3, url: peer.url });
  let last;
  for await (const batch of source) {
    found.push(told(batch));
    last = batch.tensors.x;
    batch.release();
    batch.release();
    assert.equal(last.data.length, 0);
  }
  await source.close();
  assert.deepEqual(found, expected);
});

test("a wrong password, an unknown user and no password are Unauthorized", async () => {
  for (const parts of [{ password: "wrong" }, { username: "nobody" }, { username: "", password: "" }]) {
    await assert.rejects(collect({ url: address(parts) }), (error) => {
      assert.ok(error instanceof Unauthorized);
      assert.match(
        error.message,
        /^Redis at redis:\/\/\S+:\d+ refused the login \((NOAUTH|WRONGPASS).*\): put user and/,
      );
      return true;
    });
  }
});

test("a lacking right names the user, the address and the command, also within a transaction", async () => {
  const use = async (name) => {
    const writer = await openWriter(`of-${name}`, { url: address({ username: name, password: "w" }), notify() {} });
    await writer.epoch().finally(() => writer.close());
  };
  for (const [name, command] of [
    ["no-scripts", "evalsha"],
    ["no-stream", "hsetnx"],
  ]) {
    await ask(peer.url, ["ACL", "SETUSER", name, "on", ">w", "~*", "+@all", `-${command}`]);
    await assert.rejects(use(name), (error) => {
      assert.ok(error instanceof Unauthorized, error);
      assert.match(
        error.message,
        new RegExp(`^Redis at redis://${name}@\\S+:\\d+ refused a command of user '${name}'`),
      );
      assert.match(error.message, new RegExp(`\\(NOPERM .*\\).*ACL SETUSER ${name} \\+${command}.*docs/acl\\.md`));
      assert.doesNotMatch(error.message, /:w@/);
      return true;
    });
  }
});

test("a path that is no number is no database", async () => {
  for (const parts of [{ pathname: "/abc" }, { query: { db: "one" } }]) {
    await assert.rejects(collect({ url: address(parts) }), (error) => {
      assert.ok(error instanceof BadOption, error);
      assert.match(error.message, /the database is a number, found '(abc|one)'/);
      return true;
    });
  }
  assert.deepEqual(await ask(address({ pathname: "/3/" }), ["PING"]), ["PONG"]);
});

test("an address of TLS at a port without it is given up within the time of a connection", async () => {
  const silent = createServer();
  silent.listen(0, "127.0.0.1");
  await once(silent, "listening");
  open.push(silent);
  const began = performance.now();
  await assert.rejects(collect({ url: `rediss://127.0.0.1:${silent.address().port}` }), {
    name: "ServerUnavailable",
    message: /^Redis at rediss:.* does not answer: .*, or without TLS \(then write redis:\/\/\)\?$/,
  });
  assert.ok(performance.now() - began < 8000);
  const url = (await answering("-ERR unknown command\r\n")).replace("redis:", "rediss:");
  await assert.rejects(collect({ url }), /^ServerUnavailable: no TLS is spoken at rediss:.*: write redis:\/\/ if/);
});

test("a password may have any characters", async () => {
  const [password, name] = ["p@ss:/?#%\u00e9", "some:one"];
  await ask(peer.url, ["ACL", "SETUSER", name, "on", `>${password}`, "~*", "+@all"]);
  const url = address({ username: encodeURIComponent(name), password: encodeURIComponent(password) });
  assert.equal(String((await ask(url, ["ACL", "WHOAMI"]))[0]), name);
});

test("the database is selected before anything is answered", async () => {
  await ask(address({ pathname: "/3" }), ["SET", "here", "3"]);
  assert.deepEqual(await ask(address({ query: { db: 3 } }), ["GET", "here"]), [Buffer.from("3")]);
  assert.deepEqual(await ask(peer.url, ["GET", "here"]), [null]);
  await assert.rejects(ask(address({ pathname: "/99999" }), ["SET", "here", "0"]), /DB index/);
});

test("unix sockets are an address", async () => {
  const path = join(folder, "server.sock");
  await front(() => {}, { where: { path } });
  const { username, password } = server;
  const url = `unix://${username}:${password}@${path}`;
  assert.deepEqual(await collect({ url }), await collect({}));
  assert.deepEqual(await ask(`${url}?db=3`, ["GET", "here"]), [Buffer.from("3")]);
});

test("TLS checks the certificate, and carries the same bytes", async () => {
  const [cert, key] = [join(folder, "cert.pem"), join(folder, "key.pem")];
  const subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"];
  const made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, ...subject];
  execFileSync("openssl", made, { stdio: "ignore" });
  const identity = { cert: readFileSync(cert), key: readFileSync(key) };
  const own = await front(() => {}, { listener: createTlsServer(identity) });
  const near = { protocol: "rediss:", hostname: "localhost", port: own };
  const trusting = address({ ...near, query: { ssl_ca_certs: cert } });
  for (const stream of ["images", "large"]) {
    assert.deepEqual(await collect({ url: trusting }, stream), await collect({}, stream));
  }
  assert.deepEqual(await ask(address({ ...near, query: { ssl_cert_reqs: "none" } }), ["PING"]), ["PONG"]);
  const said = [];
  const notify = (line) => said.push(line);
  const untrusted = load("images", { group: "g", batchSize: 7, url: address(near), notify });
  for (const reading of [collect({ url: address(near) }), untrusted.open()]) {
    await assert.rejects(reading, {
      name: "ServerUnavailable",
      message:
        /^the certificate shown at rediss:.* is not trusted \(self-signed.*\): name its CA with \?ssl_ca_certs=FILE/,
    });
  }
  assert.deepEqual(said, []); // it is not tried again
  const other = { ...near, hostname: "127.0.0.1" }; // the certificate does not name it
  const named = collect({ url: address({ ...other, query: { ssl_ca_certs: cert } }) });
  await assert.rejects(named, /write a host that the certificate names; \?ssl_check_hostname=false/);
  const anyName = { ssl_ca_certs: cert, ssl_check_hostname: "false" };
  assert.deepEqual(await ask(address({ ...other, query: anyName }), ["PING"]), ["PONG"]);
  const strict = await front(() => {}, {
    listener: createTlsServer({ ...identity, ca: identity.cert, requestCert: true, rejectUnauthorized: true }),
  });
  const known = { ssl_ca_certs: cert, ssl_certfile: cert, ssl_keyfile: key };
  assert.deepEqual(await ask(address({ ...near, port: strict, query: known }), ["PING"]), ["PONG"]);
  await assert.rejects(
    ask(address({ ...near, port: strict, query: { ssl_ca_certs: cert } }), ["PING"]),
    /certificate|reset/,
  );
});

test("what is no address says what one looks like", async () => {
  for (const url of [
    "localhost:6379",
    "http://localhost",
    "redis+sentinel://localhost",
    "redis://:%zz@localhost",
    "",
  ]) {
    assert.throws(() => new Connection(url), BadOption, url);
  }
});

test("connections that are cut in the middle of a value are made again, and every sample comes once", async () => {
  let cuts = 0;
  const port = await front((near, far) => {
    let left = 1_500_000;
    far.on("data", ({ length }) => {
      left -= length;
      if (left > 0 || near.destroyed) return;
      cuts += 1;
      near.destroy();
    });
  });
  assert.deepEqual(await collect({ url: address({ port }) }), await collect({}));
  assert.ok(cuts > 1, `${cuts} cuts`);
});

test("a server that went away is an error at once, and a connection is made again when it is back", async () => {
  const sockets = [];
  const port = await front((near) => sockets.push(near));
  const connection = new Connection(address({ port }));
  assert.equal(await connection.sendCommand(["PING"]), "PONG");
  const waiting = connection.sendCommand(["BLPOP", "nothing", "0"]);
  for (const socket of sockets) socket.destroy();
  await assert.rejects(waiting, /closed|reset/);
  assert.equal(await connection.sendCommand(["PING"]), "PONG");
  open.at(-1).close();
  for (const socket of sockets) socket.destroy();
  await assert.rejects(async () => {
    for (;;) {
      await connection.sendCommand(["PING"]).catch((error) => {
        if (error.code === "ECONNREFUSED") throw error;
      });
    }
  });
  connection.destroy();
  await assert.rejects(connection.sendCommand(["PING"]), /was closed/);
  for (const host of ["127.0.0.1", "localhost"]) {
    await assert.rejects(collect({ url: `redis://${host}:${port}` }), {
      name: "ServerUnavailable",
      message: /ECONNREFUSED/,
    });
  }
});

test("a server that falls silent is given up, but not one that owes nothing", async () => {
  const port = await front();
  const connection = new Connection(address({ port }), 100);
  await connection.sendCommand(["PING"]);
  await new Promise((resolve) => setTimeout(resolve, 300));
  const [before] = await Promise.all([connection.sendCommand(["CLIENT", "ID"])]);
  await assert.rejects(connection.sendCommand(["BLPOP", "nothing", "0"]), /does not answer/);
  assert.notEqual(await connection.sendCommand(["CLIENT", "ID"]), before);
  connection.destroy();
});

test("an answer that nobody asked for ends the connection, so that no later command gets it", async () => {
  const url = await answering("+PONG\r\n+for nobody\r\n");
  const connection = new Connection(url);
  for (let turn = 0; turn < 3; turn += 1) assert.equal(await connection.sendCommand(["PING"]), "PONG");
  connection.destroy();
});

test("a server that cannot write its disk is read", async () => {
  // it refuses a PING like a write
  const port = await front((near) => {
    const { write } = near;
    near.write = (chunk) => {
      const answer = chunk.toString("latin1").replace("+PONG\r\n", "-MISCONF No space left on device\r\n");
      return write.call(near, Buffer.from(answer, "latin1"));
    };
  });
  assert.deepEqual(await collect({ url: address({ port }) }), await collect({}));
});

/** Start a server that answers whatever comes first with these bytes, and return its address. */
async function answering(bytes) {
  const listener = createServer((socket) => socket.on("error", () => {}).once("data", () => socket.write(bytes)));
  listener.listen(0, "127.0.0.1");
  await once(listener, "listening");
  open.push(listener);
  return `redis://127.0.0.1:${listener.address().port}`;
}

for (const [name, answer] of [
  ["a web server", "HTTP/1.1 400 Bad Request\r\n\r\n"],
  ["noise", Buffer.from([0, 13, 10, 255, 13, 10])],
]) {
  test(`${name} in the place of a server is refused`, async () => {
    const url = await answering(answer);
    await assert.rejects(collect({ url, leaseMs: 1000 }), (error) => {
      assert.ok(error instanceof ServerUnavailable);
      assert.match(error.message, /no Redis server|closed/);
      return true;
    });
  });
}

test("once one connection found the next primary of a service, no other one stays at the former", async () => {
  const [former, next] = [await front(), await front()]; // two addresses of one server
  let primary = former;
  const sentinel = createServer((socket) => {
    socket.on("error", () => {});
    socket.on("data", (data) => {
      for (const command of String(data).split(/^\*/m).slice(1)) {
        const port = String(primary);
        const answer = `*2\r\n$9\r\n127.0.0.1\r\n$${port.length}\r\n${port}\r\n`;
        socket.write(command.includes("SENTINEL") ? answer : "+OK\r\n");
      }
    });
  });
  sentinel.listen(0, "127.0.0.1");
  await once(sentinel, "listening");
  open.push(sentinel);
  const service = address({ protocol: "redis+sentinel:", port: sentinel.address().port });
  const one = new SentinelClient(parseService(`${service}/feed`));
  const other = one.duplicate();
  try {
    for (const client of [one, other]) assert.equal(String(await client.sendCommand(["PING"])), "PONG");
    primary = next;
    await other.sendCommand(["CLIENT", "KILL", "ID", String(await one.sendCommand(["CLIENT", "ID"]))]);
    while (!one.primary().endsWith(`:${next}`)) await one.sendCommand(["PING"]).catch(() => {});
    await other.sendCommand(["PING"]);
    assert.equal(other.primary(), one.primary());
  } finally {
    one.destroy();
    other.destroy();
  }
});
