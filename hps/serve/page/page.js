// The page at `/`: polls GET /v1/stats once a second while visible, and shows the changes.

import { ask, button, follow } from "./actions.js";
import { $, Refused, cell, h, hasToken, request, show, table, wantToken } from "./dom.js";
import { TIERS, advice, ago, bytes, count, modelIn, overview, percent, portion, quantile, spans, tableFigures, time, unread } from "./figures.js";
import { checked, trials } from "./versions.js";

const PERIOD_MS = 1000, WINDOW_S = 10, HISTORY_S = 300, ANSWER_MS = 5000, PAST_EVERY_S = 15;
const OWN = /^\/(v1\/stats|v1\/history|page\/.*|docs|openapi.json)?$/; // the routes of this page
const samples = []; // {at: seconds, answer}, over the last WINDOW_S, and one before
const history = []; // {at, ...overview}, over the last HISTORY_S
let past = []; // likewise, from the server's history
const PHONE_PX = 700, MOST_KINDS = 5, MOST_NAMES = 10; // problems shown at once, models named by a condition
const opened = new Map(); // whether a model's card is open, by its name
let timer = 0, polling = false, pastAt = -Infinity, whole = false;

async function poll() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  let retry = true;
  try {
    const answer = await request("v1/stats", AbortSignal.timeout(ANSWER_MS));
    if (performance.now() / 1000 - pastAt > PAST_EVERY_S) await loadHistory();
    update(answer);
    notify("");
  } catch (error) {
    retry = fail(error);
  } finally {
    polling = false;
  }
  if (retry && !document.hidden) timer = setTimeout(poll, PERIOD_MS);
}

async function loadHistory() {
  const answer = await request("v1/history", AbortSignal.timeout(ANSWER_MS));
  pastAt = performance.now() / 1000;
  past = spans(answer).map((sample) => ({ at: pastAt - sample.age, ...sample }));
}

function fail(error) {
  document.body.classList.add("old");
  state("no answer", "bad");
  const last = samples.at(-1);
  const old = last ? ` The figures below are ${time(performance.now() / 1000 - last.at)} old.` : "";
  if (error instanceof Refused && error.status === 401) {
    state("locked", "fair");
    notify(hasToken() ? "The server rejects this token." : "");
    $("main").hidden = true;
    wantToken(() => { $("main").hidden = false; poll(); });
    return false;
  }
  notify(error instanceof Refused ? `The server answers with an error: ${error.message}.${old}` : `The server does not answer.${old}`);
  return true;
}

function notify(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").hidden = !text;
}

function state(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = `badge ${kind}`;
}

function update(answer) {
  const at = performance.now() / 1000;
  if (samples.length && answer.server?.started !== samples[0].answer.server?.started) { // the server was restarted
    samples.length = 0;
    history.length = 0;
    pastAt = -Infinity;
    past = [];
  }
  if (samples.length) {
    const before = samples.at(-1).answer;
    if (answer.at_s === before.at_s) return; // the same answer as before, shared with another page
    history.push({ at, ...overview(answer, before, answer.at_s - before.at_s) });
    while (history[0].at < at - HISTORY_S) history.shift();
  }
  samples.push({ at, answer });
  while (samples.length > 2 && samples[1].at <= at - WINDOW_S) samples.shift();
  document.body.classList.remove("old");
  const before = samples[0].answer, seconds = Math.max(answer.at_s - before.at_s, 1e-9);
  follow(answer);
  const [worst] = answer.conditions;
  state(worst ? worst.name : "ready", worst ? { error: "bad", warning: "fair" }[worst.level] : "good");
  document.title = worst ? `${worst.name} · hps` : "hps";
  show($("alert"), ...answer.conditions.map((found) => condition(found, answer.time_s, worst.level)));
  $("alert").hidden = !worst;
  $("about").textContent = answer.server
    ? `${location.host} · ${answer.server.version} · up ${time(answer.time_s - answer.server.started)}` : location.host;
  show($("tiles"), ...tiles(overview(answer, before, seconds)));
  show($("problems"), problems(answer));
  const cards = trials(answer);
  show($("versions"), ...cards);
  $("trials").hidden = !cards.length;
  show($("models"), ...models(answer, before, seconds));
  for (const card of document.querySelectorAll("details.model")) {
    const { model } = card.dataset;
    if (!opened.has(model)) opened.set(model, answer.models.length <= (innerWidth < PHONE_PX ? 1 : 3));
    card.open = opened.get(model);
  }
  show($("devices"), ...devices(answer));
  show($("work"), work(answer));
  show($("http"), http(answer, before, seconds));
  show($("changes"), changes(answer));
  fillChoices(answer);
}

// -- charts and bars ------------------------------------------------------------------------------------------------------

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function chart(names, text, most) {
  const now = performance.now() / 1000, from = whole ? -Infinity : now - HISTORY_S, live = history[0]?.at ?? Infinity;
  const points = [...past.filter((point) => point.at >= from && point.at < live), ...history];
  const span = Math.max(60, points.length ? now - points[0].at : 0);
  const values = points.flatMap((point) => names.map((name) => point[name])).filter((value) => value !== null);
  const top = most ?? Math.max(1e-12, ...values);
  const drawn = svg("svg", { class: "chart", viewBox: "0 0 300 50", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(svg("line", { x1: 0, y1: 49.5, x2: 300, y2: 49.5 }));
  for (const name of names) {
    let path = "", drawing = false;
    for (const point of points) {
      if (point[name] === null) { drawing = false; continue; }
      path += `${drawing ? "L" : "M"}${(300 * (1 - (now - point.at) / span)).toFixed(1)} ${(49 - 47 * point[name] / top).toFixed(1)}`;
      drawing = true;
    }
    drawn.append(svg("path", { d: path || "M0 0" }));
  }
  return [drawn, h("div.axis", {}, h("span", {}, `${time(span)} ago`), h("span", {}, values.length ? `top ${text(top)}` : ""), h("span", {}, "now"))];
}

// A bar of parts, each [name, share, text], with a legend.
function bar(parts) {
  const shown = parts.filter(([, share]) => share > 0);
  const line = h("div.bar", { role: "img", ariaLabel: shown.map(([name, , text]) => `${name} ${text}`).join(", ") });
  for (const [, share] of shown) {
    const part = h("i");
    part.style.width = `${Math.min(100, 100 * share)}%`;
    line.append(part);
  }
  return line;
}

function tiles(figures) {
  const tile = (id, name, value, more, drawn) =>
    h("div.card.tile", { id }, h("span.name", {}, name), h("b", {}, value), h("div.more", {}, more), ...drawn);
  return [
    tile("tile-keys", "Keys per second", count(figures.keys), "requested, including duplicates", chart(["keys"], count)),
    tile("tile-lookups", "Lookups per second", count(figures.lookups), "", chart(["lookups"], count)),
    tile("tile-latency", "Lookup latency, p99", time(figures.p99), `p50 ${time(figures.p50)} · p95 ${time(figures.p95)}`,
      chart(["p99", "p95", "p50"], time)),
    tile("tile-hits", "Hit rate of the cache", percent(figures.hitRate), "of the keys of the last 10 s", chart(["hitRate"], percent, 1)),
  ];
}

// -- sections -------------------------------------------------------------------------------------------------------------

function condition(found, now, worst) {
  const since = `since ${clockTime(found.since_s)}, ${time(Math.round(Math.max(0, now - found.since_s)))}${worst === "warning" ? "; lookups are answered" : ""}`;
  return h(`div.condition.${found.level === "error" ? "bad" : "fair"}`, {}, h("p.head", {}, h("b", {}, found.models.length ? `${named(found.models)}: ${found.name}` : found.name), h("span.soft", {}, since), h("a", { href: `runbooks#${found.runbook}` }, "Runbook")),
    h("p", {}, found.text), otherTexts(found));
}

const named = (models) => models.slice(0, MOST_NAMES).join(", ") + (models.length > MOST_NAMES ? ` and ${models.length - MOST_NAMES} more` : "");

// The further texts of a condition or problem, folded.
const otherTexts = (found) => (found.others.length ? h("details", {}, h("summary.soft", {}, found.others.length > 1 ? `${found.others.length} other texts` : "another text"), ...found.others.map((text) => h("p.soft", {}, text))) : null);

const clockTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

function models(answer, before, seconds) {
  if (!answer.models.length) return [h("p.soft", {}, "No model is configured.")];
  return answer.models.map((status) => {
    const model = modelIn(answer, status.name), earlier = modelIn(before, status.name);
    const same = model && earlier && model.since === earlier.since ? earlier : null;
    const kind = { ready: "good", failed: "bad" }[status.state] ?? "fair";
    const head = h("summary.head", {}, h("h3", {}, status.name), h(`span.badge.${kind}`, {}, status.state === "loading" ? `loading, ${status.percent} %` : status.state));
    const card = h("details.card.model", {}, head);
    card.dataset.model = status.name;
    const changing = answer.changes.find((change) => change.model === status.name && change.status === undefined);
    if (model) head.append(...chips(model), h("span.soft.line", {}, line(model, same, seconds)));
    if (changing) head.append(h("span.chip.now", {}, "a change is under way"));
    if (status.reason) card.append(h("p", {}, status.reason));
    if (status.state === "loading" || status.state === "waiting" || status.state === "failed") card.append(...loads(status));
    if (model) {
      const others = model.versions.filter(([version]) => version !== model.version).map(([version, is]) => `version ${version} ${is}`);
      card.append(h("p.soft", {}, [`version ${model.version} for ${time(answer.time_s - model.since)}`, ...others, `workspaces ${model.busy_workspaces} of ${model.workspaces} busy`].join(" · ")));
      if (chosen(model)) card.append(h("p.fair.pinned", {}, model.pinned));
      for (const checks of model.checks ?? []) if (checks.version === model.version) card.append(h("p.soft", {}, `checks: ${checked(checks, answer.time_s)}`));
      const todo = advice(model, same, seconds);
      if (todo.length) card.append(h("ul.advice.fair", {}, ...todo.map((text) => h("li", {}, text))));
      card.append(...stages(model, same), tables(model, same, seconds));
    }
    const kept = model?.fleet ? "" : model?.versions.filter(([, is]) => is === "kept").at(-1)?.[0] ?? "", running = model?.rollout?.state === "running";
    const made = [button("deploy", status.name, "Deploy…"), model && !running ? button("rollback", status.name, kept ? `Roll back to ${kept}…` : "Roll back…", kept) : null,
      model && chosen(model) ? button("unpin", status.name, "Unpin…") : null, model && !running ? button("canary", status.name, "Start a canary…") : null].filter(Boolean);
    if (made.length) card.append(h("div.buttons", {}, ...made));
    return card;
  });
}

// Whether a pin or the fleet's document chose the version; `pinned` also describes held versions.
const chosen = (model) => model.fleet || model.pinned.startsWith("pinned");

// What a closed card tells besides its state.
function chips(model) {
  const found = Object.keys(unread(model)).map((tier) => ["fair", `${TIERS[tier]} not read`]);
  found.push(...model.versions.filter(([, is]) => is === "held").map(([version]) => ["fair", `${version} held`]));
  if (chosen(model)) found.push(["fair", model.fleet ? "fleet" : "pinned"]);
  if (model.shard) found.push(["shard", `share ${model.shard}`]);
  if (model.rollout?.state === "running") found.push(["now", `${model.rollout.mode} ${portion(model.rollout.share)}`]);
  return found.map(([kind, text]) => h(`span.chip.${kind}`, {}, text));
}

function line(model, before, seconds) {
  const figures = overview({ server: { models: [model] } }, { server: { models: before ? [before] : [] } }, seconds);
  const p99 = figures.p99 === null ? "" : ` · p99 ${time(figures.p99)}`, hits = figures.hitRate === null ? "" : ` · hits ${percent(figures.hitRate)}`;
  return `v${model.version} · ${count(before ? figures.lookups : 0)} lookups/s${p99}${hits}`;
}

function loads(status) {
  return status.tables.map((table) => {
    const share = table.state === "done" ? 1 : table.rows ? table.rows_done / table.rows : 0;
    const left = table.seconds_left == null ? "" : `, ${time(table.seconds_left)} left`;
    const text = table.rows == null ? table.state : `${table.state}, ${count(table.rows_done)} of ${count(table.rows)} rows${left}`;
    const row = h("div.load", {}, h("div.keys", {}, h("span", {}, table.name), h("span", {}, text)), bar([[table.name, share, text]]));
    row.dataset.percent = (100 * share).toFixed(1);
    return row;
  });
}

function stages(model, before) {
  const spent = Object.entries(model.stages).map(([name, now]) => [name, now.total_s - (before?.stages[name]?.total_s ?? 0)]);
  const whole = spent.reduce((sum, [, s]) => sum + s, 0);
  const lookups = model.lookups.count - (before?.lookups.count ?? 0);
  if (whole <= 0 || lookups <= 0) return [];
  const parts = spent.filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]).slice(0, 6)
    .map(([name, s]) => [TIERS[name] ?? name, s / whole, `${percent(s / whole)}, ${time(s / lookups)} per lookup`]);
  const latency = [0.5, 0.99].map((share) => time(quantile(model.lookups, before?.lookups, share)));
  return [
    h("div.keys", {}, h("span", {}, `p50 ${latency[0]}, p99 ${latency[1]}; the time goes to`), ...parts.map(([name, , text]) => h("span", {}, `${name} ${text}`))),
    bar(parts),
  ];
}

function tables(model, before, seconds) {
  const sizes = (table, tier) => {
    const found = table.tiers.filter((t) => t.tier === tier);
    if (!found.length) return "";
    if (found.some((t) => !t.available)) return "not read";
    return found.some((t) => t.vector_bytes === null) ? "–" : bytes(found.reduce((n, t) => n + t.vector_bytes + (t.overhead_bytes ?? 0), 0));
  };
  const rows = model.tables.map((table) => {
    const f = tableFigures(table, before?.tables.find((t) => t.name === table.name) ?? null, seconds);
    const cache = table.tiers.find((t) => t.tier === "embedding_cache");
    const filled = cache?.capacity_rows ? `${count(cache.rows)} of ${count(cache.capacity_rows)}` : "";
    const row = h("tr", {}, cell(table.name), cell(count(table.dim)), cell(count(table.rows)), cell(count(f.keysPerS)),
      ...Object.keys(TIERS).map((tier) => cell(table.tiers.some((t) => t.tier === tier) ? percent(f.rates[tier]) : "")),
      cell(percent(f.defaults)), cell(filled), cell(cache ? count(f.evictionsPerS) : ""),
      ...Object.keys(TIERS).map((tier) => cell(sizes(table, tier))));
    row.dataset.table = table.name;
    return row;
  });
  return table(`Tables of ${model.name}`, ["table", "dim", "rows", "keys/s", "hits: cache", "volatile", "persistent", "unknown", "cached rows", "evicted/s",
    "size: cache", "volatile", "persistent"], rows);
}

function devices(answer) {
  if (!answer.server) return [];
  const cards = answer.server.devices.map((device) => {
    const all = device.memory_bytes || 1, used = device.memory_bytes - device.free_bytes;
    const parts = [["caches", device.cache_bytes / all, bytes(device.cache_bytes)], ["other", Math.max(0, used - device.cache_bytes) / all, bytes(Math.max(0, used - device.cache_bytes))]];
    return h("div.card", {},
      h("div.head", {}, h("h3", {}, device.device === "cpu" ? "CPU" : `GPU ${device.device}`), h("span.soft", {}, device.name)),
      device.memory_bytes ? bar(parts) : "",
      h("div.keys", {}, h("span", {}, `caches ${bytes(device.cache_bytes)}`),
        device.memory_bytes ? h("span", {}, `free ${bytes(device.free_bytes)} of ${bytes(device.memory_bytes)}`) : null,
        device.pinned_bytes ? h("span", {}, `pinned ${bytes(device.pinned_bytes)}`) : null));
  });
  return [...cards, h("div.card", {}, h("div.head", {}, h("h3", {}, "Process"), h("span.soft", {}, `resident ${bytes(answer.server.memory_bytes)}`)))];
}

function work(answer) {
  if (!answer.server) return h("p.soft", {}, "Nothing is running yet.");
  const rows = Object.entries(answer.server.queues).map(([name, n]) => h("tr", {}, cell(name), cell(`${count(n)} batches waiting`)));
  rows.push(...Object.entries(answer.server.updates).map(([name, lag]) => h("tr", {}, cell(`updates of ${name}`), cell(lag === null ? "lag unknown" : `${time(lag)} behind`))));
  const service = answer.service;
  rows.push(h("tr", {}, cell("connections"), cell(`${count(service.connections)} on ${count(service.fronts)} fronts`)));
  rows.push(h("tr", {}, cell("lookups over HTTP and gRPC"), cell(`${count(service.pending)} under way`)));
  rows.push(h("tr", {}, cell("held for clients"), cell(bytes(service.held_bytes))));
  return h("div.card", {}, table("Background work", ["work", "now"], rows));
}

function http(answer, before, seconds) {
  const earlier = new Map(before.service.requests.map((counted) => [counted.route, counted]));
  const rows = answer.service.requests.filter((counted) => !OWN.test(counted.route)).flatMap((counted) => {
    const was = earlier.get(counted.route), since = (status) => (counted.statuses[status] - (was?.statuses[status] ?? 0)) / seconds;
    const failing = Object.keys(counted.statuses).filter((status) => status >= 400 && since(status) > 0).map((status) => `${status}: ${since(status).toFixed(1)}/s`);
    const rate = Object.keys(counted.statuses).reduce((sum, status) => sum + since(status), 0);
    return rate === 0 ? [] : h("tr", {}, cell(counted.route), cell(count(rate)), cell(time(quantile(counted.latency, was?.latency, 0.5))),
      cell(time(quantile(counted.latency, was?.latency, 0.99))), cell(failing.join(", ") || "none"));
  });
  return rows.length ? h("div.card", {}, table("Requests by route", ["route", "requests/s", "p50", "p99", "errors"], rows)) : h("p.soft", {}, "No requests besides this page's in the last seconds.");
}

function problems(answer) {
  if (!answer.problems.length) return h("p.soft", {}, "None since the start.");
  const entries = answer.problems.map((problem) => {
    const last = ago(answer.time_s - problem.time_s);
    const when = problem.count > 1 ? `${count(problem.count)} times, last ${last}, first at ${clockTime(problem.first_s)}` : `once, ${last}, at ${clockTime(problem.time_s)}`;
    return h("li.problem", {}, h("p.head", {}, h(`b.${problem.level === "warning" ? "fair" : "bad"}`, {}, problem.level), h("span.soft", {}, when)), h("p", {}, problem.text), otherTexts(problem));
  });
  const list = (shown) => h("ol.problems", {}, ...shown), more = entries.slice(MOST_KINDS);
  return h("div.card", {}, list(entries.slice(0, MOST_KINDS)), more.length ? h("details", {}, h("summary", {}, `${more.length} more kinds`), list(more)) : null);
}

function changes(answer) {
  if (!answer.changes.length) return h("p.soft", {}, "None was requested since the start.");
  return h("div.card", {}, table("Changes of models", ["when", "change", "by", "outcome"], answer.changes.map((change) => h("tr", {},
    cell(new Date(change.since).toLocaleString("sv-SE")), cell(change.what, "text"), cell(change.by, "text"),
    h(`td.text${change.error ? ".bad" : ""}`, {}, change.status === undefined ? "under way" : change.error ?? `done after ${change.seconds.toFixed(1)} s`)))));
}

// -- key lookup -----------------------------------------------------------------------------------------------------------

function fill(select, names) {
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function fillChoices(answer) {
  const known = answer.server?.models ?? [];
  fill($("find-model"), known.map((model) => model.name));
  fill($("find-table"), (known.find((model) => model.name === $("find-model").value) ?? { tables: [] }).tables.map((model) => model.name));
}

function int64(text) { // JavaScript's numbers end at 2^53
  try {
    const key = BigInt(text.trim());
    return text.trim() && BigInt.asIntN(64, key) === key ? key : null;
  } catch {
    return null;
  }
}

async function find(event) {
  event.preventDefault();
  const key = int64($("find-key").value);
  const shown = $("found");
  if (key === null) return shown.replaceChildren(h("p.bad", {}, "A key is a 64-bit integer."));
  const [model, table] = [$("find-model").value, $("find-table").value].map(encodeURIComponent);
  try {
    const row = await request(`v1/models/${model}/tables/${table}/rows/${key}`, AbortSignal.timeout(ANSWER_MS));
    shown.replaceChildren(answered(row, key));
  } catch (error) {
    shown.replaceChildren(h("p.bad", {}, error instanceof Refused ? error.message : "The server does not answer."));
  }
}

function answered(row, key) {
  const where = row.found ? `answered by the ${{ embedding_cache: "embedding cache", volatile_db: "volatile database", persistent_db: "persistent database" }[row.tier]}`
    : "in no tier: this is the default vector";
  const written = row.written_at ? `written ${new Date(row.written_at).toLocaleString()}` : row.found ? "time of writing unknown" : "";
  const most = Math.max(1e-30, ...row.vector.map((value) => Math.abs(value ?? 0)));
  const drawn = h("div.vector", { role: "img", ariaLabel: `vector of ${row.vector.length} values` });
  for (const value of row.vector.slice(0, 256)) {
    const part = h("i");
    const tall = (20 * (value ?? 0)) / most;
    part.style.height = `${Math.max(1, Math.abs(tall))}px`;
    part.style.transform = `translateY(${-tall / 2}px)`;
    drawn.append(part);
  }
  const numbers = row.vector.map((value) => (value === null ? "NaN or inf" : String(Math.fround(value) === value ? value : Number(value.toPrecision(9)))));
  return h("div.card", {}, h("div.head", {}, h("h3", {}, `${key} in ${row.model}.${row.table}`), h(`span.badge.${row.found ? "good" : "fair"}`, {}, where), h("span.soft", {}, [written, `version ${row.version}`].filter(Boolean).join(" · "))),
    drawn, h("p.numbers", {}, numbers.slice(0, 8).join("  ")),
    numbers.length > 8 ? h("details", {}, h("summary", {}, `all ${numbers.length} values`), h("p.numbers", {}, numbers.join("  "))) : null);
}

$("span").addEventListener("click", () => {
  whole = !whole;
  $("span").textContent = whole ? "Charts: since the start" : "Charts: 5 minutes";
  if (samples.length > 1) show($("tiles"), ...tiles(overview(samples.at(-1).answer, samples[0].answer, Math.max(samples.at(-1).answer.at_s - samples[0].answer.at_s, 1e-9))));
});
document.addEventListener("toggle", (event) => { // does not bubble
  if (event.target.matches?.("details.model")) opened.set(event.target.dataset.model, event.target.open);
}, true);
document.addEventListener("click", (event) => {
  const pressed = event.target.closest("[data-act]");
  if (pressed) ask(pressed.dataset, modelIn(samples.at(-1).answer, pressed.dataset.of)?.fleet ?? false);
});
for (const section of document.querySelectorAll("details.section")) section.open = innerWidth >= PHONE_PX;
$("find").addEventListener("submit", find);
$("find-model").addEventListener("change", () => samples.length && fillChoices(samples.at(-1).answer));
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
