// A gateway as a process, for tests of its clients.
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

/**
 * Start `penstock gateway train/g` on a port, or a free one.
 *
 * @param redis The URL of the streams' server.
 */
export async function startGateway(redis, ...more) {
  const words = ["-m", "penstock", "gateway", "--json", "--ahead", "1kb", "--url", redis];
  const group = more.includes("--tokens") ? [] : ["train/g"];
  const port = more.includes("--port") ? [] : ["--port", "0"];
  const env = { ...process.env, PYTHONPATH: "common:producer:consumer:front" };
  const stdio = ["ignore", "pipe", "pipe"];
  const child = spawn(".venv/bin/python", [...words, ...group, ...port, ...more], { cwd: ROOT, env, stdio });
  const ended = new Promise((resolve) => child.once("close", resolve));
  let said = "";
  child.stderr.on("data", (text) => {
    said += text;
  });
  let text = "";
  for await (const piece of child.stdout) {
    text += piece;
    if (text.endsWith("\n}\n")) break;
  }
  if (text === "") throw new Error(`the gateway ended: ${said}`);
  const { url, tokens } = JSON.parse(text);
  return {
    url,
    token: tokens[0]?.token,
    /** End it as an operator does. */
    async end() {
      child.kill("SIGTERM");
      await ended;
      return said;
    },
    /** End it at once. */
    async kill() {
      child.kill("SIGKILL");
      await ended;
    },
  };
}
