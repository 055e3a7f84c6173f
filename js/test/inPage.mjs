// Opens a page of a folder in Chromium and prints its title once a script has set it, then again for each file given to it:
// node inPage.mjs FOLDER PAGE [FILE ...]
import { serveFolder, startChromium } from "./chromium.mjs";

const [folder, name, ...files] = process.argv.slice(2);
const site = await serveFolder(folder);
const chromium = await startChromium();
const page = await chromium.open(site.url + name);
let title = files.length > 0 ? await page.title() : "";

async function printNext() {
  await page.waitForFunction((old) => document.title !== old, title);
  title = await page.title();
  console.log(title);
}

if (files.length === 0) await printNext();
else await page.locator('[role="status"]').filter({ hasText: "knows" }).waitFor();
for (const file of files) {
  await page.setInputFiles("#file", file);
  await printNext();
}
await chromium.close();
await site.close();
