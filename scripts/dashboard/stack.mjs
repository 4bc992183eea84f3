// Emulated clusters, routers and load, as child processes that end with this one.
import {spawn} from "node:child_process";
import {mkdtempSync, openSync, readFileSync} from "node:fs";
import {tmpdir} from "node:os";
import {join} from "node:path";

const PYTHON = `${process.env.VENV || ".venv"}/bin/python`;
export const folder = mkdtempSync(join(tmpdir(), "balanceroute-dashboard-"));
const children = new Set();

export function run(name, ...args) {
  const log = join(folder, `${name}.log`), out = openSync(log, "a");
  const child = spawn(PYTHON, ["-m", "balanceroute", ...args], {stdio: ["ignore", out, out]});
  child.log = log;
  child.ended = new Promise(resolve => child.on("exit", code => { children.delete(child); resolve(code); }));
  children.add(child);
  return child;
}
export async function end(child, signal = "SIGKILL") {
  child.kill(signal);
  await child.ended;
}
export async function endAll() {
  for (const child of children) child.kill("SIGTERM");
  const late = setTimeout(() => children.forEach(child => child.kill("SIGKILL")), 8000);
  await Promise.all([...children].map(child => child.ended));
  clearTimeout(late);
}
export async function until(what, test, within_s = 60) {
  const deadline = Date.now() + within_s * 1e3;
  for (;;) {
    let found = false;
    try { found = await test(); } catch (error) { if (Date.now() > deadline) throw error; }
    if (found) return found;
    if (Date.now() > deadline) throw new Error(`not within ${within_s} s: ${what}`);
    await new Promise(resolve => setTimeout(resolve, 200));
  }
}
export async function answers(url, within_s = 120) {
  await until(`${url} answers`, async () => (await fetch(url)).ok, within_s);
}
export async function cluster(name, port, decode, ...more) {
  const config = join(folder, `${name}.yaml`), listen = port + 400;
  const child = run(name, "emulate", "--prefill", "2", "--decode", String(decode), "--base-port", String(port),
    "--write-config", config, "--listen-port", String(listen), ...more);
  await answers(`http://127.0.0.1:${port}/health`);
  await until("the configuration is written", () => readFileSync(config, "utf8").includes("policy"));
  return {child, config, url: `http://127.0.0.1:${listen}`, port};
}
export async function router(name, of, ...more) {
  const child = run(name, "serve", "--config", of.config, "--log-level", "warning", ...more);
  await answers(`${of.url}/ready`);
  return child;
}
