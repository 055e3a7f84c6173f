// A Node member as a process of its own, that takes its time for each batch and says what peer.py's `member` says.
import { setTimeout as sleep } from "node:timers/promises";
import { load } from "../dist/index.js";

const given = JSON.parse(process.argv[2]);
const { stream, pause_s: pauseS, lease_s: leaseS, batch_size: batchSize, rank: place, ...options } = given;
const say = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

const tuning = { leaseMs: 1000 * leaseS, prefetchBytes: 2000 };
const order = place === undefined ? {} : { rank: place[0], worldSize: place[1] };
const loader = load(stream, { acknowledge: "manual", batchSize, ...order, ...tuning, ...options });
await loader.open();
say({ joined: options.member ?? null });
for await (const batch of loader) {
  const identities = [...batch.identities()];
  say({ given: identities });
  await sleep(1000 * pauseS);
  await batch.ack();
  say({ acknowledged: identities });
}
await loader.close();
say({ left: true });
