// Chromium for tests of pages: the one that CHROME_BIN names, or one on PATH. Nothing is downloaded.
import { accessSync, constants } from "node:fs";
import { readFile, realpath } from "node:fs/promises";
import { createServer } from "node:http";
import { delimiter, extname, join, sep } from "node:path";
import { chromium } from "playwright-core";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
const TYPES = {
  ".css": "text/css",
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".json": "application/json",
  ".mjs": "text/javascript",
  ".png": "image/png",
  ".wasm": "application/wasm",
};

const executablePath = find();

/**
 * The reason to skip a test that needs Chromium, or false: `test(name, { skip: noChromium }, ...)`.
 * In CI a missing Chromium is an error.
 */
export const noChromium =
  executablePath === null &&
  "needs Chromium: install it (Debian: apt-get install chromium), or set CHROME_BIN to its path";

if (noChromium && process.env.CI === "true") throw new Error(`This test ${noChromium}.`);

function find() {
  if (process.env.CHROME_BIN) return process.env.CHROME_BIN;
  const paths = process.env.PATH.split(delimiter).flatMap((folder) => NAMES.map((name) => join(folder, name)));
  return paths.find(isExecutable) ?? null;
}

function isExecutable(path) {
  try {
    accessSync(path, constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

/**
 * Start Chromium without a window.
 *
 * `open(url)` returns playwright's page. `close()` ends Chromium, and throws if a page had an error that nobody caught.
 */
export async function startChromium() {
  const args = process.getuid?.() === 0 ? ["--no-sandbox"] : [];
  const browser = await chromium.launch({ executablePath, args });
  const errors = [];
  return {
    async open(url, options = {}) {
      const page = await browser.newPage(options);
      page.on("pageerror", (error) => errors.push(error));
      await page.goto(url);
      return page;
    },
    async close() {
      await browser.close();
      if (errors.length > 0) throw new AggregateError(errors, errors.map((error) => error.stack).join("\n"));
    },
  };
}

/** Serve the files of a folder on a free port of this host, as any static server does. Links are followed. */
export async function serveFolder(folder) {
  const root = await realpath(folder);
  const server = createServer(async (request, response) => {
    const path = join(root, decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const file = path.endsWith(sep) ? join(path, "index.html") : path;
    const content = file.startsWith(root + sep) ? await readFile(file).catch(() => null) : null;
    response.writeHead(content === null ? 404 : 200, {
      "Content-Type": TYPES[extname(file)] ?? "application/octet-stream",
      "Content-Length": content?.length ?? 0,
    });
    response.end(request.method === "HEAD" ? null : content);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}/`,
    async close() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}
