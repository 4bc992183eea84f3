"use strict";
// The page of one router. `past` holds the last 15 minutes in the form that uPlot draws: columns, null for what is
// not known. /dashboard/data brings them once, /dashboard/stream a sample per second. No answer for STALE_MS: grey; for
// DEAD_MS: begun anew.

const SPAN_S = 900, STALE_MS = 3500, DEAD_MS = 10000, HEAD_MS = 3000, BODY_MS = 30000, GAP_S = 2.5, FAINT = 24, HEAT_FROM = 13;
const byId = id => document.getElementById(id);
const past = {at: [], series: {}, loads: {}, usage: {}, loadAt: []};
let now = null, events = [], lastHeard = 0, source = null, stride = 1, sinceThin = 0, charts = {}, drawnAt = 0;

// -- elements

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  return element;
}
function cell(text, className, tag = "td") { return make(tag, className, text); }
function table(element, caption, heads, rows) {
  const head = make("thead"), line = make("tr"), body = make("tbody");
  heads.forEach(([text, className]) => { const th = cell(text, className, "th"); th.scope = "col"; line.append(th); });
  head.append(line);
  body.append(...rows);
  element.setAttribute("aria-label", caption);
  element.replaceChildren(head, body);
}
function row(cells) { const line = make("tr"); line.append(...cells); return line; }
function svg(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
function bar(share, mean, off) {  // a share from 0 to 1; null: unknown, no bar at all
  const holder = make("td"), track = make("div", "track" + (off ? " off" : ""));
  const picture = svg("svg", {viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true"});
  if (share !== null) picture.append(svg("rect", {class: "fill", x: 0, y: 0, width: 100 * Math.min(1, share), height: 10}));
  if (mean !== null) picture.append(svg("rect", {class: "mean", x: Math.min(99, 100 * mean), y: 0, width: 1, height: 10}));
  track.append(picture);
  holder.append(track);
  return holder;
}

// -- numbers; unknown is a word. `like`: the number whose unit is taken, so that an axis has one

const UNKNOWN = "unknown";
function short(value, like = value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (like >= 1e6) return (value / 1e6).toFixed(2) + "\u00a0M";
  if (like >= 1e4) return (value / 1e3).toFixed(like >= 1e5 ? 0 : 1) + "\u00a0k";
  return (value < 10 && value % 1 ? value.toFixed(1) : Math.round(value)).toString();
}
function whole(value) { return value === null || value === undefined ? UNKNOWN : Math.round(value).toLocaleString("en"); }
function seconds(value, like = value) {
  if (value === null || value === undefined) return "none yet";
  return like < 1 ? (value * 1e3).toFixed(like < 0.1 ? 1 : 0) + "\u00a0ms" : value.toFixed(like < 100 ? 2 : 0) + "\u00a0s";
}
function percent(value) { return value === null || value === undefined ? UNKNOWN : (100 * value).toFixed(1) + "\u00a0%"; }
function clock(at) { return new Date(at * 1e3).toLocaleTimeString("en-GB"); }
function ago(from_s) {
  const age = Math.max(0, Math.round((now ? now.unix_s : Date.now() / 1e3) - from_s));
  return age < 120 ? age + " s" : Math.round(age / 60) + " min";
}
function last(name) { const all = past.series[name]; return all && all.length ? all[all.length - 1] : null; }

// -- the past

function take(data) {
  const whole_ = data.past;
  past.at = Array.from(whole_.at);
  for (const part of ["series", "loads", "usage"]) {
    past[part] = Object.create(null);  // a worker may be called "constructor"
    for (const [name, values] of Object.entries(whole_[part])) past[part][name] = values;
  }
  stride = whole_.stride;
  sinceThin = 0;
  past.loadAt = past.at.filter((_, i) => (past.at.length - 1 - i) % stride === 0);
  events = data.events;
  fillGaps();
}
function fillGaps() {  // a second that was missed is a gap, not a line across it
  for (const [times, groups] of [[past.at, [past.series, past.usage]], [past.loadAt, [past.loads]]]) {
    const limit = GAP_S * (times === past.loadAt ? stride : 1);
    for (let i = times.length - 1; i > 0; i--) {
      if (times[i] - times[i - 1] > limit) insertGap(times, groups, i, (times[i] + times[i - 1]) / 2);
    }
  }
}
function insertGap(times, groups, index, at) {
  times.splice(index, 0, at);
  groups.forEach(group => Object.values(group).forEach(values => values.splice(index, 0, null)));
}
function add(sample) {
  if (past.at.length && sample.at <= past.at[past.at.length - 1]) return;
  append(past.at, [[past.series, sample.series], [past.usage, sample.usage]], sample.at, GAP_S);
  sinceThin += 1;
  if (sinceThin >= stride) {
    sinceThin = 0;
    append(past.loadAt, [[past.loads, sample.loads]], sample.at, GAP_S * stride);
  }
}
function append(times, groups, at, gap) {
  if (times.length && at - times[times.length - 1] > gap) {
    insertGap(times, groups.map(([group]) => group), times.length, (at + times[times.length - 1]) / 2);
  }
  for (const [group, values] of groups) {
    for (const name of Object.keys(group)) if (!Object.hasOwn(values, name)) delete group[name];  // the worker has left
    for (const [name, value] of Object.entries(values)) {
      if (!group[name]) group[name] = new Array(times.length).fill(null);  // it has come
      group[name].push(value);
    }
  }
  times.push(at);
  let old = 0;
  while (old < times.length && times[old] < at - SPAN_S) old++;
  if (old) {
    times.splice(0, old);
    groups.forEach(([group]) => Object.values(group).forEach(values => values.splice(0, old)));
  }
}

// -- charts

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
const KINDS = {down: "--orange", up: "--green", drain: "--dim", reload: "--blue", policy: "--blue", deploy: "--blue"};
function markEvents(u) {
  const pen = u.ctx, {left, top, width, height} = u.bbox;
  pen.save();
  pen.lineWidth = devicePixelRatio;
  pen.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const event of events) {
    const x = Math.round(u.valToPos(event.at, "x", true));
    if (x < left || x > left + width) continue;
    pen.strokeStyle = colour(KINDS[event.kind] || "--dim");
    pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + height); pen.stroke();
  }
  pen.restore();
}
function axes(format) {
  const shared = {stroke: () => colour("--dim"), grid: {stroke: () => colour("--grid"), width: 1}, ticks: {show: false}};
  const times = (u, splits, axis, space, step_s) => splits.map(at => clock(at).slice(0, step_s < 60 ? 8 : 5));
  const ticks = (u, splits) => splits.map(at => at ? format(at, splits[splits.length - 1]) : "0");
  return [{...shared, values: times, space: 90, size: 30}, {...shared, size: 58, space: 28, values: ticks}];
}
function chart(id, lines, format, faint = 0) {
  const holder = byId(id);
  holder.replaceChildren();
  const series = [{label: "time", value: (u, at) => at ? clock(at) : "now"}];
  lines.forEach(([label, variable, dash, name]) => series.push({
    label, width: 2, dash, stroke: () => colour(variable), spanGaps: false, points: {show: false},
    value: (u, value, line, index) => format(index === null || index === undefined ? last(name) : value),
  }));
  const legend = {live: true};
  for (let i = 0; i < faint; i++) {
    series.push({label: "", class: "faint", show: true, width: 1, stroke: () => colour("--faint"), spanGaps: false, points: {show: false}});
  }
  const options = {
    width: Math.max(200, holder.clientWidth), height: heightOf(id), series, axes: axes(format), legend,
    cursor: {drag: {x: false, y: false}}, scales: {x: {time: false, range: () => range()}, y: {range: (u, low, high) => [0, nice(high)]}},
    hooks: {draw: [markEvents], ready: [u => hideFaint(u)]},
  };
  const drawn = new uPlot(options, [[]].concat(series.slice(1).map(() => [])), holder);
  drawn.root.querySelector("canvas").setAttribute("role", "img");
  return drawn;
}
function heightOf(id) { return id === "chart-load" ? 260 : 170; }
function hideFaint(u) { u.root.querySelectorAll(".u-legend .faint").forEach(entry => entry.remove()); }
function nice(high) {
  if (!(high > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(high));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map(factor => factor * power).find(value => value >= high * 1.02) || high * 1.1;
}
function range() {
  const end = past.at.length ? past.at[past.at.length - 1] : Date.now() / 1e3;
  const begin = past.at.length ? Math.max(past.at[0], end - SPAN_S) : end - 60;
  return [Math.min(begin, end - 60), end];
}
function buildCharts() {
  Object.values(charts).forEach(each => each.u.destroy());
  const names = Object.keys(past.loads), faint = names.length <= FAINT ? names : [];
  const made = (id, lines, format, more = []) => (
    {id, columns: lines.map(line => line[3]), faint: more, u: chart(id, lines, format, more.length)});
  charts = {
    load: made("chart-load", [["most", "--orange", [], "load_max"], ["mean", "--ink", [], "load_mean"],
      ["least", "--blue", [], "load_min"]], short, faint),
    idle: made("chart-idle", [["idle", "--orange", [], "idle_ratio"]], percent),
    tokens: made("chart-tokens", [["tokens/s", "--blue", [], "tokens_per_s"]], short),
    ttft: made("chart-ttft", [["p50", "--blue", [], "ttft_p50_s"], ["p99", "--orange", [6, 4], "ttft_p99_s"]], seconds),
    tpot: made("chart-tpot", [["p50", "--blue", [], "tpot_p50_s"], ["p99", "--orange", [6, 4], "tpot_p99_s"]], seconds),
    waiting: made("chart-waiting", [["for a prefiller", "--orange", [], "queued"], ["prefilling", "--ink", [2, 3], "prefilling"],
      ["in the pool", "--blue", [], "pooled"]], short),
    hits: made("chart-hits", [["found", "--blue", [], "hits_found"], ["predicted", "--orange", [6, 4], "hits_predicted"]], percent),
    age: made("chart-age", [["oldest", "--orange", [], "oldest_wait_s"]], seconds),
  };
}
function drawCharts() {
  const names = Object.keys(past.loads);
  const wanted = names.length <= FAINT ? names.join() : "";
  if (!charts.load || charts.load.faint.join() !== wanted) buildCharts();
  byId("faint-too").hidden = !wanted;
  for (const each of Object.values(charts)) {
    const columns = each.columns.map(name => past.series[name] || []);
    each.u.setData([past.at, ...columns, ...each.faint.map(name => past.loads[name])]);
    each.u.root.querySelector("canvas").setAttribute("aria-label", spoken(each));
  }
  drawHeat();
}
function spoken(each) {
  const title = byId(each.id).parentElement.querySelector("h2").firstChild.textContent.trim();
  const read = each.u.series.slice(1, 1 + each.columns.length)
    .map((line, i) => line.label + " " + line.value(each.u, null, i + 1, null));
  return title + " over the last 15 minutes; now " + read.join(", ");
}
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function shade(share) {
  const at = Math.min(0.9999, Math.max(0, share)) * 4, i = Math.floor(at), part = at - i;
  return VIRIDIS[i].map((from, k) => Math.round(from + (VIRIDIS[i + 1][k] - from) * part));
}
function drawHeat() {
  const names = Object.keys(past.loads), part = byId("heat-part");
  part.hidden = names.length < HEAT_FROM;
  if (part.hidden || !past.loadAt.length) return;
  const canvas = byId("heat"), width = Math.max(200, canvas.clientWidth), ratio = devicePixelRatio || 1;
  const rowHeight = Math.max(2, Math.min(14, Math.floor(320 / names.length))), height = rowHeight * names.length;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), [begin, end] = range();
  const most = Math.max(1, ...(past.series.load_max || []).filter(value => value !== null));
  const bin = Math.max(1, Math.floor(canvas.width / 300)), bins = Math.ceil(canvas.width / bin);
  const columnOf = new Int32Array(past.loadAt.map(at => Math.min(bins - 1, Math.floor((at - begin) / (end - begin) * bins))));
  pen.fillStyle = colour("--grid");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const each = rowHeight * ratio;
  names.forEach((name, line) => {
    const values = past.loads[name], shown = new Array(bins).fill(undefined);
    for (let i = 0; i < columnOf.length; i++) if (columnOf[i] >= 0) shown[columnOf[i]] = values[i];
    for (let i = 1; i < bins; i++) if (shown[i] === undefined && bins > columnOf.length) shown[i] = shown[i - 1];
    shown.forEach((value, i) => {
      if (value === undefined) return;
      pen.fillStyle = value === null ? ((i + line) % 2 ? colour("--dim") : colour("--card")) : "rgb(" + shade(value / most).join() + ")";
      pen.fillRect(i * bin, line * each, bin, Math.max(1, each - (each > 4 ? 1 : 0)));
    });
  });
  byId("heat-high").textContent = short(most) + " tokens";
  canvas.setAttribute("aria-label", "Load of " + names.length + " workers over time, from 0 to " + short(most) + " tokens");
}

// -- now

function tiles() {
  const waiting = now.waiting, up = now.workers.filter(worker => worker.state === "up").length;
  const spread = last("load_max") === null || last("load_max") === undefined ? null : last("load_max") - last("load_min");
  const figures = [
    ["tokens/s", short(last("tokens_per_s"))],
    ["decode workers up", up + " of " + now.workers.length],
    ["requests decoding", whole(last("running"))],
    ["queue · prefill · pool", waiting.queued + " · " + waiting.prefilling + " · " + waiting.pooled],
    ["oldest in the pool", waiting.pooled ? seconds(last("oldest_wait_s")) : "nobody waits"],
    ["load spread, tokens", short(spread)],
    ["idle at the barrier", last("idle_ratio") === null ? "no load" : percent(last("idle_ratio"))],
    ["TTFT p50 / p99", seconds(last("ttft_p50_s")) + " / " + seconds(last("ttft_p99_s"))],
    ["TPOT p50 / p99", seconds(last("tpot_p50_s")) + " / " + seconds(last("tpot_p99_s"))],
    ["finished/s", short(last("finished_per_s"))],
    ["failed or expired", whole(now.requests.failed === null ? null : now.requests.failed + now.requests.expired)],
  ];
  byId("tiles").replaceChildren(...figures.map(([name, value]) => {
    const tile = make("div");
    tile.append(make("dt", "", name), make("dd", "", value));
    return tile;
  }));
}
function banner() {
  const down = [...now.workers.map(w => ["decode worker", w]), ...now.prefillers.map(w => ["prefiller", w])]
    .filter(([, worker]) => worker.state === "down");
  const lines = down.slice(0, 8).map(([tier, worker]) => tier + " " + worker.id + " is down since "
    + (worker.since ? clock(worker.since) : "an unknown time") + ": " + (worker.why || "the reason is unknown"));
  if (down.length > 8) lines.push("and " + (down.length - 8) + " more");
  lines.push(...now.degraded_by);
  if (now.draining) lines.unshift("The router is draining: new requests are refused.");
  const box = byId("banner"), text = lines.join("\n");
  if (box.dataset.text === text) return;  // a screen reader hears it once
  box.dataset.text = text;
  if (!lines.length) { box.replaceChildren(); return; }
  const list = make("ul");
  list.append(...lines.map(line => make("li", "", line)));
  box.replaceChildren(make("strong", "bad", down.length ? down.length + (down.length > 1 ? " workers are down" : " worker is down") : "Degraded"), list);
}
function standing(worker) {
  const since = worker.since && worker.state !== "up" ? " for " + ago(worker.since) : "";
  return cell(worker.state + since + (worker.why ? ": " + worker.why : ""), "text " + (worker.state === "up" ? "dim" : "bad"));
}
function drainButton(worker, type) {
  const holder = make("td", "text"), button = make("button", "", worker.drained ? "Undrain" : "Drain");
  button.setAttribute("aria-label", button.textContent + " " + worker.id);
  button.dataset.worker = worker.id;
  button.addEventListener("click", () => act(worker.drained ? "/instances/undrain" : "/instances/drain",
    {type, instances: [{url: worker.url, id: worker.id}]}, worker.id + (worker.drained ? " takes requests again" : " gets nothing new")));
  holder.append(button);
  return holder;
}
function workers() {
  const load = worker => worker.load_tokens + worker.foreign_tokens;
  const most = Math.max(1, ...now.workers.map(load)), mean = last("load_mean");
  const others = now.workers.some(worker => worker.foreign_requests);
  const heads = [["worker", "text"], ["load", "text"], ["tokens"], ["slots"], ...(others ? [["others: requests · tokens"]] : []), ["state", "text"], ["action", "text"]];
  table(byId("workers"), "Decode workers", heads, now.workers.map(worker => {
    const down = worker.state === "down";
    const head = cell(worker.id, "text", "th");
    head.scope = "row";
    return row([head, bar(down ? null : load(worker) / most, mean === null ? null : mean / most, down),
      cell(down ? UNKNOWN : whole(worker.load_tokens)), cell(worker.active + "/" + worker.slots),
      ...(others ? [cell(worker.foreign_requests ? worker.foreign_requests + " · " + whole(worker.foreign_tokens) : "none")] : []),
      standing(worker), drainButton(worker, "decode")]);
  }));
}
function prefillers() {
  const share = (worker, tokens) => tokens === null || !worker.prompt_tokens ? UNKNOWN : percent(Math.min(1, tokens / worker.prompt_tokens));
  const heads = [["prefiller", "text"], ["KV cache", "text"], ["KV in use"], ["cache hits"], ["predicted"], ["prefills now"], ["pinned tokens"], ["state", "text"], ["action", "text"]];
  table(byId("prefillers"), "Prefillers", heads, now.prefillers.map(worker => {
    const down = worker.state === "down", usage = down ? null : worker.kv_usage;
    const head = cell(worker.id, "text", "th");
    head.scope = "row";
    return row([head, bar(usage, null, down), cell(percent(usage)), cell(share(worker, worker.hit_tokens)), cell(share(worker, worker.predicted_tokens)), cell(worker.inflight),
      cell(whole(worker.pinned_tokens)), standing(worker), drainButton(worker, "prefill")]);
  }));
}
function keepFocus(draw) {  // tables are made anew each second; who stands on a button stays there
  const held = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.worker : undefined;
  draw();
  if (held !== undefined) {
    const again = [...document.querySelectorAll("button[data-worker]")].find(button => button.dataset.worker === held);
    if (again) again.focus({preventScroll: true});
  }
}
function knobs() {
  const rows = {policy: now.policy, predictor: now.policy === "br_h" ? now.predictor : "not asked", "prefill policy": now.prefill_policy, ...now.knobs};
  byId("knobs").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [make("dt", "", name), make("dd", "", String(value))]));
  byId("token-part").hidden = !now.needs_token;
  const wanted = now.policies.join();
  for (const id of ["switch-to", "first", "second"]) {
    const select = byId(id);
    if (select.dataset.names === wanted) continue;
    select.dataset.names = wanted;
    select.replaceChildren(...now.policies.map(name => make("option", "", name)));
    select.value = id === "second" ? (now.policy === "join_shortest_queue" ? "level_fit" : "join_shortest_queue") : now.policy;
  }
}
const STAGES = ["overdue", "abundant", "scarce", "at once"];
function decisions(rows, count) {
  const heads = [["when", "text"], ["request", "text"], ["worker", "text"], ["stage", "text"], ["score"], ["otherwise", "text"], ["its score"]];
  table(byId("decisions"), "Decisions", heads, rows.map(each => row([cell(Math.round(each.age_s) + " s ago", "text"),
    cell(each.request, "text"), cell(each.worker, "text"), cell(STAGES[each.stage] || String(each.stage), "text"), cell(whole(each.score)),
    cell(each.runner_up, each.runner_up.includes(" to ") ? "text" : "text dim"), cell(each.runner_up_score === null ? "-" : whole(each.runner_up_score))])));
  byId("decision-count").textContent = whole(count) + " so far, the last " + rows.length + " with a known runner-up";
}
function listEvents() {
  byId("events").replaceChildren(...events.slice(-60).reverse().map(event => {
    const line = make("li"), time = make("time", "", clock(event.at));
    line.append(time, make("span", event.kind === "down" ? "bad" : "", event.text));
    return line;
  }));
}
function show(data) {
  now = data;
  byId("what").textContent = data.version + " · " + data.policy + " · " + data.workers.length + " decode workers · " + data.prefillers.length + " prefillers";
  tiles(); banner(); keepFocus(() => { workers(); prefillers(); }); knobs();
}

// -- what is asked

async function act(path, body, done) {
  const token = byId("token").value.trim(), headers = {"content-type": "application/json"};
  if (token) headers.authorization = "Bearer " + token;
  const told = byId("told");
  try {
    const reply = await fetch(path, {method: "POST", headers, body: JSON.stringify(body), cache: "no-store"});
    if (reply.ok) { told.className = ""; told.textContent = done; return; }
    const error = (await reply.json()).error;
    told.textContent = reply.status === 401 && now.needs_token ? "This needs the admin token: enter it above." : error.message;
    if (reply.status === 401) byId("token").focus();
  } catch (error) {
    told.textContent = error.message;
  }
  told.className = "bad";
}
byId("switch").addEventListener("submit", event => {
  event.preventDefault();
  const name = byId("switch-to").value;
  act("/routing/policy", {policy: name}, "The policy is " + name + " now.");
});
byId("what-if").addEventListener("submit", async event => {
  event.preventDefault();
  const names = [...new Set([byId("first").value, byId("second").value])], told = byId("outlook-told");
  told.textContent = "asking";
  try {
    const query = names.map(name => "policy=" + encodeURIComponent(name)).join("&");
    const reply = await fetch("/dashboard/what_if?" + query, {cache: "no-store"});
    const found = await reply.json();
    if (!reply.ok) throw new Error(found.error.message);
    compare(found);
    told.textContent = found.waiting ? found.waiting + " requests waited at " + clock(Date.now() / 1e3)
      : "Nothing waited in the pool at " + clock(Date.now() / 1e3) + ": no policy would do anything.";
  } catch (error) {
    told.textContent = error.message;
  }
});
function compare(found) {
  const all = found.policies, lines = [
    ["admits", each => each.admitted + " of " + found.waiting],
    ["most loaded then, tokens", each => whole(each.max_load_tokens)],
    ["mean load then, tokens", each => whole(each.mean_load_tokens)],
    ["idle at the barrier then", each => each.max_load_tokens ? percent(1 - each.mean_load_tokens / each.max_load_tokens) : "no load"],
    ["why no more", each => each.reason],
    ["first admissions", each => each.admissions.slice(0, 8).map(a => a.request + " → " + a.worker).join("\n") || "none"],
  ];
  table(byId("outlook"), "What the policies would do", [["policy", "text"], ...all.map(each => [each.policy, "text"])], lines.map(([name, get]) => {
    const head = cell(name, "text", "th");
    head.scope = "row";
    return row([head, ...all.map(each => { const found_ = cell(get(each), "text"); found_.style.whiteSpace = "pre-line"; return found_; })]);
  }));
}

// -- the stream

function heard() { lastHeard = Date.now(); }
function standingOfPage() {
  const status = byId("status"), silent_ms = Date.now() - lastHeard;
  const stale = !lastHeard || silent_ms > STALE_MS;
  document.body.classList.toggle("stale", stale && lastHeard > 0);
  const text = !lastHeard ? "waiting for the router" : stale ? "no answer from the router: last update " + Math.round(silent_ms / 1e3) + " s ago" : "live";
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", stale);
  if (stale && lastHeard) document.title = "(no answer) balanceroute";
  else document.title = now && now.workers.some(worker => worker.state === "down") ? "(worker down) balanceroute" : "balanceroute";
  if (source && source.readyState !== EventSource.CLOSED && silent_ms > DEAD_MS) {
    source.close();  // after a sleep, or behind a NAT that has forgotten it, a connection may be dead, and no error tells
    begin();
  }
}
async function begin() {
  const asked = new AbortController();
  let timer = setTimeout(() => asked.abort(), HEAD_MS);  // over a dead connection: the next try takes another
  try {
    const reply = await fetch("/dashboard/data", {cache: "no-store", signal: asked.signal});
    clearTimeout(timer);
    timer = setTimeout(() => asked.abort(), BODY_MS);
    if (reply.status === 401) { location.reload(); return; }  // the session has ended: the page that asks for the token
    if (!reply.ok) throw new Error("status " + reply.status);
    const data = await reply.json();
    heard();
    take(data);
    show(data);
    drawCharts();
    listEvents();
    listen();
  } catch (error) {
    setTimeout(begin, 2000);
  }
  clearTimeout(timer);
  standingOfPage();
}
function listen() {
  let first = true;
  source = new EventSource("/dashboard/stream");
  source.onmessage = message => {
    const data = JSON.parse(message.data);
    heard();
    const thin = stride > 1 && data.sample && Object.keys(data.sample.loads).length <= FAINT;  // so few come whole
    if (thin || data.clock_sets !== now.clock_sets) {  // the router's clock was set, and its past with it
      source.close();
      begin();
      return;
    }
    if (data.sample) add(data.sample);
    if (data.events.length) { events = (first ? data.events : events.concat(data.events)).slice(-200); listEvents(); }
    first = false;
    show(data);
    decisions(data.decisions, data.decision_count);
    if (!document.hidden && Date.now() - drawnAt > 900) { drawnAt = Date.now(); drawCharts(); }
    standingOfPage();
  };
  source.onerror = () => {  // what was missed is in the router's memory: begin anew, when it is there again
    source.close();
    setTimeout(begin, 1500);
  };
}
addEventListener("resize", () => {
  for (const each of Object.values(charts)) {
    const holder = byId(each.id);
    each.u.setSize({width: Math.max(200, holder.clientWidth), height: heightOf(each.id)});
  }
  drawHeat();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Object.values(charts).forEach(each => each.u.redraw()));
setInterval(standingOfPage, 500);
begin();
