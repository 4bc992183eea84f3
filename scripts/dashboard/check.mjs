// What scripts/test_dashboard checks, one after the other; a check that fails ends it with exit code 1.
import assert from "node:assert/strict";
import {mkdirSync, readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {connect, createServer} from "node:net";
import {join, resolve} from "node:path";
import {answers, cluster, end, endAll, folder, router, run, until} from "./stack.mjs";

const tools = createRequire(resolve(".dashboard-tools/package.json"));
const {chromium} = tools("playwright-core");
const AXE = readFileSync(tools.resolve("axe-core/axe.min.js"), "utf8");
const MEMORY_S = Number(process.env.MEMORY_S || 600), PICTURES = process.env.SCREENSHOTS || "docs/images", ONLY = process.env.ONLY || "";
const FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
  + "--disable-component-update --disable-sync --js-flags=--expose-gc";
const TOKEN = "the-admin-token-of-this-check";
mkdirSync(PICTURES, {recursive: true});

const context = await chromium.launchPersistentContext(join(folder, "profile"), {
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium", headless: true, args: FLAGS.split(" "),
  viewport: {width: 1280, height: 900}, bypassCSP: false,
});
const problems = [];

async function open(url, scheme = "light", viewport = {width: 1280, height: 900}) {
  const page = await context.newPage();
  await page.emulateMedia({colorScheme: scheme});
  await page.setViewportSize(viewport);
  page.on("request", request => { if (!request.url().startsWith(url) && !request.url().startsWith("data:")) problems.push(`outside: ${request.url()}`); });
  page.on("pageerror", error => problems.push(`script: ${error.stack || error}`));
  page.on("console", message => { if (/Content Security Policy|Refused/.test(message.text())) problems.push(`csp: ${message.text()}`); });
  await page.goto(url);
  return page;
}
const status = page => page.locator("#status").textContent();
const live = page => until("the page is live", async () => await status(page) === "live", 60);
const tile = (page, name) => page.locator("#tiles div", {has: page.locator("dt", {hasText: name})}).locator("dd").first().textContent();
async function axe(page, what) {
  const session = await context.newCDPSession(page);  // beside the page's policy, which lets no other script in
  await session.send("Runtime.evaluate", {expression: AXE});
  const reply = await session.send("Runtime.evaluate", {expression: "axe.run({resultTypes: ['violations']}).then(r => JSON.stringify(r.violations.map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.html.slice(0, 120) + ' ' + n.failureSummary).join(' | '))))", awaitPromise: true});
  await session.detach();
  assert.deepEqual(JSON.parse(reply.result.value), [], `axe, ${what}`);
}
async function fits(page, what) {
  const wide = await page.evaluate(() => document.scrollingElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `${what}: ${wide} px too wide`);
  const cut = await page.evaluate(() => [...document.querySelectorAll("#tiles dd")].filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent));
  assert.deepEqual(cut, [], `${what}: values that reach into the next`);
  const broken = await page.evaluate(() => [...document.querySelectorAll("#tiles dd, #workers td, #prefillers td")].filter(e => {
    const range = document.createRange();
    range.selectNodeContents(e);
    return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1 && !e.querySelector("svg, button");
  }).map(e => e.textContent));
  assert.deepEqual(broken, [], `${what}: values over several lines`);
}
// fullPage, which takes no part of the viewport for all
const picture = (page, name) => page.screenshot({path: join(PICTURES, `${name}.png`), fullPage: true});
async function mortal(port) {  // a way to the router whose connections die without a word, as those of a computer that slept
  const ends = [];
  const server = createServer(client => {
    const far = connect(port, "127.0.0.1");
    client.pipe(far).pipe(client);
    client.on("error", () => far.destroy());
    far.on("error", () => client.destroy());
    ends.push(client, far);
  });
  await new Promise(resolve => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    die: () => ends.splice(0).forEach(each => { each.unpipe(); each.pause(); }),
    end: () => { server.close(); ends.forEach(each => each.destroy()); },
  };
}
async function check(name, work) {
  if (!name.includes(ONLY)) return;
  const began = Date.now();
  await work();
  assert.deepEqual(problems, [], name);
  console.log(`ok  ${name} (${((Date.now() - began) / 1e3).toFixed(0)} s)`);
}
const load = (name, url, ...more) => run(name, "load", url, "--trace", "heavy_tailed", "--prompt-scale", "0.1", "--output-scale", "0.3", ...more);

async function repeat(url, times) {  // a prompt that prefillers have cached from the second time on
  const body = JSON.stringify({model: "emulated", max_tokens: 2, prompt: "the barrier waits for the fullest worker ".repeat(200)});
  for (let i = 0; i < times; i++) {
    const reply = await fetch(`${url}/v1/completions`, {method: "POST", headers: {"content-type": "application/json"}, body});
    assert.ok(reply.ok, `status ${reply.status}`);
    await reply.arrayBuffer();
  }
}

try {
  const small = await cluster("cluster", 23000, 8, "--processes", "8", "--max-num-seqs", "8", "--prefix-caching");
  const ROUTED = ["--set", "prefill.policy=prefix_affinity"];
  let serving = await router("router", small, ...ROUTED);
  load("load", small.url, "--rate", "7.5");  // a little more than is served
  let page = await open(small.url);

  await check("the address alone leads to the dashboard, which shows load", async () => {
    await live(page);
    assert.ok(page.url().endsWith("/dashboard"));
    await until("tokens flow", async () => parseFloat(await tile(page, "tokens/s")) > 10, 120);
    await until("decisions are listed", async () => await page.locator("#decisions tbody tr").count() > 3, 60);
    await until("a runner-up is worked out", async () => (await page.locator("#decisions tbody").textContent()).match(/ to 127|no other choice/), 60);
    await repeat(small.url, 12);
    await until("prefix-cache hits are shown, found beside predicted", async () => await page.evaluate(
      () => last("hits_found") > 0 && last("hits_predicted") > 0), 60);
    await until("30 s of history", async () => await page.evaluate(() => past.at.length) > 30, 90);
    await axe(page, "light");
    await fits(page, "1280 px");
    await picture(page, "dashboard-light");
  });
  await check("a page opened now shows the past", async () => {
    const second = await open(small.url);
    await live(second);
    assert.ok(await second.evaluate(() => past.at.length) > 25);
    await second.close();
  });
  await check("dark", async () => {
    const dark = await open(small.url, "dark");
    await live(dark);
    await until("charts are drawn", async () => await dark.evaluate(() => Object.keys(charts).length) > 5);
    await axe(dark, "dark");
    await picture(dark, "dashboard-dark");
    await dark.close();
  });
  await check("390 px: nothing overflows and no value breaks", async () => {
    const phone = await open(small.url, "light", {width: 390, height: 844});
    await live(phone);
    await until("tiles are there", async () => await phone.locator("#tiles dd").count() > 5);
    await fits(phone, "390 px");
    await axe(phone, "390 px");
    await picture(phone, "dashboard-phone");
    await phone.close();
  });
  await check("keyboard alone: drain, undrain, another policy, what others would do", async () => {
    const first = page.locator("#workers button").first();
    await first.focus();
    await page.keyboard.press("Enter");
    await until("it is drained", async () => (await page.locator("#workers tbody tr").first().textContent()).includes("draining"));
    assert.equal(await tile(page, "decode workers up"), "7 of 8");
    assert.equal(await page.evaluate(() => document.activeElement.tagName), "BUTTON", "the focus stays through updates");
    await page.keyboard.press("Enter");
    await until("it is up again", async () => (await page.locator("#workers tbody tr").first().locator("td").nth(3).textContent()) === "up");
    await page.locator("#switch-to").selectOption("br_0");
    await page.locator("#switch button").press("Enter");
    await until("the policy is br_0", async () => (await page.locator("#what").textContent()).includes("br_0"));
    await until("its knobs are shown", async () => (await page.locator("#knobs").textContent()).includes("r_max"));
    await page.locator("#what-if button").press("Enter");
    await until("two policies side by side", async () => await page.locator("#outlook thead th").count() === 3);
    const told = ["23100 is drained", "23100 takes requests again", "policy level_fit → br_0"];
    const listed = () => page.locator("#events").textContent();
    await until("events tell", async () => { const text = await listed(); return told.every(each => text.includes(each)); }, 20)
      .catch(async error => { throw new Error(`${error.message}; there is: ${await listed()}`); });
    await axe(page, "after actions");
  });
  await check("a dead worker: which, since when, why; its load is unknown, not 0", async () => {
    const killed = await fetch(`http://127.0.0.1:${small.port - 1}/_emulator/fault`, {method: "POST", body: JSON.stringify({worker: "d1", kind: "sigkill"})});
    assert.ok(killed.ok);
    await until("the banner names it", async () => /127\.0\.0\.1:23101 is down since \d\d:\d\d:\d\d: .+/.test(await page.locator("#banner").textContent()), 60);
    const row = page.locator("#workers tbody tr").nth(1);
    assert.equal(await row.locator("td").nth(1).textContent(), "unknown");
    await until("its line ends", async () => await page.evaluate(() => past.loads["127.0.0.1:23101"].at(-1)) === null);
    await until("it is an event", async () => (await page.locator("#events").textContent()).includes("127.0.0.1:23101 is down"));
    await axe(page, "worker down");
    await picture(page, "dashboard-worker-down");
    await fetch(`http://127.0.0.1:${small.port - 1}/_emulator/fault`, {method: "POST", body: JSON.stringify({worker: "d1", kind: "respawn"})});
    await until("the banner goes", async () => !(await page.locator("#banner").textContent()).includes("is down"), 60);
  });
  await check("connections that died without a word: grey, then live over another one", async () => {
    const way = await mortal(Number(new URL(small.url).port)), slept = await open(way.url);
    await live(slept);
    way.die();
    await until("the page says so", async () => (await status(slept)).startsWith("no answer from the router"), 30);
    await live(slept);
    await slept.close();
    way.end();
  });
  await check("a dead router: grey, with the age of what is shown; then live again", async () => {
    await end(serving);
    await until("the page says so", async () => /no answer from the router: last update \d+ s ago/.test(await status(page)), 30);
    assert.ok(await page.evaluate(() => document.body.classList.contains("stale")));
    await axe(page, "stale");
    await picture(page, "dashboard-router-gone");
    serving = await router("router-again", small, ...ROUTED, "--set", `auth.admin_token=${TOKEN}`);
    await until("the browser is asked for the token", async () => await page.locator("input#token[required]").count() === 1, 60);
    await axe(page, "sign in");
    await page.locator("#token").fill(TOKEN);
    await page.keyboard.press("Enter");
    await page.waitForURL("**/dashboard");
    await until("live again", async () => await page.locator("#tiles").count() === 1 && await status(page) === "live", 60);
  });
  await check("with an admin token the cookie shows, and the token changes", async () => {
    await page.locator("#workers button").first().click();
    await until("it asks for the token", async () => (await page.locator("#told").textContent()).includes("needs the admin token"));
    await page.locator("#token").fill(TOKEN);
    await page.locator("#workers button").first().click();
    await until("it is drained", async () => (await page.locator("#workers tbody tr").first().textContent()).includes("draining"));
  });
  await check(`the page's memory does not grow (${MEMORY_S} s)`, async () => {
    const session = await context.newCDPSession(page);
    const heap = async () => {
      await session.send("HeapProfiler.collectGarbage");
      const metrics = Object.fromEntries((await session.send("Performance.getMetrics")).metrics.map(m => [m.name, m.value]));
      return {bytes: metrics.JSHeapUsedSize, nodes: metrics.Nodes};
    };
    await session.send("Performance.enable");
    const samples = [];
    for (let s = 0; s <= MEMORY_S; s += MEMORY_S / 10) {
      samples.push(await heap());
      await new Promise(resolve => setTimeout(resolve, MEMORY_S * 100));
    }
    const first = samples[2], lastOne = samples.at(-1);
    console.log(`    heap ${samples.map(s => (s.bytes / 2 ** 20).toFixed(1)).join(" ")} MiB, nodes ${samples.map(s => s.nodes).join(" ")}`);
    // the page's own history grows up to 15 minutes: some 40 numbers per second
    assert.ok(lastOne.bytes < first.bytes + MEMORY_S * 2000 + 2 ** 20, "heap");
    assert.ok(lastOne.nodes < first.nodes * 1.3 + 500, "nodes");
  });
  await page.close();
  await end(small.child, "SIGTERM");
  await end(serving);

  await check("144 workers stay readable", async () => {
    const large = await cluster("large", 24000, 144, "--max-num-seqs", "16");
    await router("router-large", large, "--set", "routing.policy=join_shortest_queue");
    load("load-large", large.url, "--rate", "20");
    const wide = await open(large.url);
    await live(wide);
    await until("the heat map is there", async () => await wide.locator("#heat").isVisible());
    await until("load", async () => await wide.evaluate(() => past.series.load_max.at(-1)) > 1000, 120);
    await until("40 s of it", async () => await wide.evaluate(() => past.at.length) > 40, 120);
    const colours = await wide.evaluate(() => {
      const canvas = document.getElementById("heat"), data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const seen = new Set();
      for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
      return seen.size;
    });
    assert.ok(colours > 20, `${colours} colours`);
    await fits(wide, "144 workers");
    await axe(wide, "144 workers");
    await picture(wide, "dashboard-144-workers");
    await wide.setViewportSize({width: 390, height: 844});
    await fits(wide, "144 workers on a phone");
    await wide.close();
  });
  await check("a past that came thinned is read anew when few workers are left, whatever they are called", async () => {
    const crowd = await cluster("crowd", 25000, 2);
    await router("router-crowd", crowd, "--set", "lifecycle.join_attempts=100");
    const change = async (what, instances) => {
      const body = JSON.stringify({type: "decode", instances});
      const reply = await fetch(`${crowd.url}/instances/${what}`, {method: "POST", headers: {"content-type": "application/json"}, body});
      assert.ok(reply.ok, await reply.text());
    };
    const dead = Array.from({length: 800}, (_, i) => ({url: `127.0.0.1:${i + 1}`, id: `dead-${i}`}));
    const recorded = async () => (await (await fetch(`${crowd.url}/dashboard/data`)).json()).past;
    await until("some of the past", async () => (await recorded()).at.length > 50);
    await change("add", dead);
    await until("all are in the past", async () => Object.keys((await recorded()).loads).length > 800);
    const shown = await open(crowd.url);
    await until("the past is thinned", async () => await shown.evaluate(() => stride) > 1);
    await change("remove", dead);
    await change("add", [{url: "127.0.0.1:801", id: "constructor"}]);
    await until("few are left", async () => await shown.evaluate(() => Object.keys(past.loads).includes("constructor") && !document.getElementById("faint-too").hidden));
    const lengths = await shown.evaluate(() => charts.load.u.data.map(column => column.length));
    assert.equal(new Set(lengths).size, 1, `columns of ${lengths} values`);
    await live(shown);
    await shown.close();
  });
  console.log(`all is well; pictures in ${PICTURES}`);
} catch (error) {
  console.error(error);
  console.error(`logs in ${folder}`);
  process.exitCode = 1;
} finally {
  await context.close();
  await endAll();
}
