// The function `load`, which makes a loader that reads from Redis or, with a token, through a gateway.

import { GatewayLoader } from "./gateway/loader.js";
import type { GatewayOptions } from "./gateway/options.js";
import { Loader } from "./group/loader.js";
import type { LoaderOptions } from "./group/options.js";

/**
 * Read the batches of a stream as a member of a group. Every group gets every sample, and its members share them. Python
 * processes may be members of the same group. With `rank` and `worldSize` the order is canonical: the same for the same
 * plan, whichever workers produced it.
 *
 * @param stream The stream's name.
 * @param options With a `token`, those of a gateway. Its `url` begins with `ws:` or `wss:`.
 * @returns The batches. Each iteration is the group's next epoch, or a feed without end.
 * @throws BadOption or BadName.
 * @example
 * const loader = load("train", { group: "resnet", batchSize: 64 });
 * for await (const batch of loader) train(batch.tensors.x.data);
 * await loader.close();
 */
export function load(stream: string, options: LoaderOptions): Loader;
/** Read through `penstock gateway`, which a token opens. It works in a browser, too. */
export function load(stream: string, options: GatewayOptions): GatewayLoader;
export function load(stream: string, options: LoaderOptions | GatewayOptions): Loader | GatewayLoader {
  return options?.token !== undefined ? new GatewayLoader(stream, options) : new Loader(stream, options);
}
