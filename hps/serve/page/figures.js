// Figures of the last seconds: differences of the counters in two answers of GET /v1/stats.

export const TIERS = { embedding_cache: "cache", volatile_db: "volatile", persistent_db: "persistent" };

// Quantile `share` of the seconds counted between two histograms; null if nothing was counted.
export function quantile(now, before, share) {
  const count = now.count - (before?.count ?? 0);
  if (count <= 0) return null;
  let below = 0, low = 0;
  for (let i = 0; i < now.buckets.length; i++) {
    const [bound, all] = now.buckets[i];
    const upTo = all - (before ? before.buckets[i][1] : 0);
    if (upTo >= share * count) return low + ((bound - low) * (share * count - below)) / (upTo - below);
    below = upTo;
    low = bound;
  }
  return low;
}

// Add histograms of the same bounds.
export function added(all) {
  if (!all.length) return { count: 0, total_s: 0, buckets: [] };
  return all.slice(1).reduce((sum, times) => ({
    count: sum.count + times.count,
    total_s: sum.total_s + times.total_s,
    buckets: sum.buckets.map(([bound, n], i) => [bound, n + times.buckets[i][1]]),
  }), all[0]);
}

const modelsOf = (answer) => answer.server?.models ?? [];
export const modelIn = (answer, name) => modelsOf(answer).find((model) => model.name === name);

// Figures of one table between two answers; `before` may lack it.
export function tableFigures(table, before, seconds) {
  const since = (get) => get(table) - (before ? get(before) : 0);
  const rates = {};
  for (const tier of Object.keys(TIERS)) {
    const sum = (what) => (table) => table.tiers.filter((t) => t.tier === tier).reduce((n, t) => n + (t[what] ?? 0), 0);
    const hits = since(sum("hits")), asked = hits + since(sum("misses"));
    rates[tier] = table.tiers.some((t) => t.tier === tier) && asked > 0 ? hits / asked : null;
  }
  const keys = since((table) => table.keys);
  const evictions = since((table) => table.tiers.reduce((n, t) => n + (t.evictions ?? 0), 0));
  return { keys, rates, keysPerS: keys / seconds, evictionsPerS: evictions / seconds,
    defaults: keys > 0 ? since((table) => table.defaults) / keys : null };
}

// Figures of the server between two answers.
export function overview(now, before, seconds) {
  const of = (answer) => added(modelsOf(answer).map((model) => model.lookups));
  const latency = of(now), earlier = modelsOf(now).length === modelsOf(before).length ? of(before) : null;
  const sum = (answer, get) => modelsOf(answer).flatMap((model) => model.tables).reduce((n, table) => n + get(table), 0);
  const cache = (what) => (table) => table.tiers.filter((t) => t.tier === "embedding_cache").reduce((n, t) => n + t[what], 0);
  const since = (get) => Math.max(0, sum(now, get) - sum(before, get));
  const hits = since(cache("hits")), asked = hits + since(cache("misses"));
  return {
    lookups: Math.max(0, latency.count - of(before).count) / seconds,
    keys: since((table) => table.keys) / seconds,
    p50: quantile(latency, earlier, 0.5), p95: quantile(latency, earlier, 0.95), p99: quantile(latency, earlier, 0.99),
    hitRate: asked > 0 ? hits / asked : null,
  };
}

// The points of GET /v1/history as figures of the spans between them, each with its age in seconds.
export function spans(answer) {
  return answer.points.slice(1).map((now, i) => {
    const before = answer.points[i], seconds = now.at_s - before.at_s;
    const since = (name) => Math.max(0, now[name] - before[name]), whole = now.latency.count >= before.latency.count;
    const earlier = before.latency.count ? before.latency : null; // without lookups it has no buckets
    const q = (share) => (whole ? quantile(now.latency, earlier, share) : null); // else a model was undeployed
    const asked = since("hits") + since("misses");
    return { age: answer.at_s - now.at_s, lookups: Math.max(0, now.latency.count - before.latency.count) / seconds,
      keys: since("keys") / seconds, p50: q(0.5), p95: q(0.95), p99: q(0.99), hitRate: asked > 0 ? since("hits") / asked : null };
  });
}

// The tables of a model by the tier that is skipped for them.
export function unread(model) {
  const found = {};
  for (const table of model.tables) for (const tier of table.tiers) if (!tier.available) (found[tier.tier] ??= []).push(table.name);
  return found;
}

// What to do about figures of a model that are bad, in the order of their weight; `before` may be missing.
export function advice(model, before, seconds) {
  const found = [];
  const spent = Object.entries(model.stages).map(([name, now]) => [name, now.total_s - (before?.stages[name]?.total_s ?? 0)]);
  const whole = spent.reduce((sum, [, s]) => sum + s, 0);
  for (const [name, s] of spent) {
    const rule = STAGE_ADVICE[name];
    if (rule && whole > 0 && s / whole >= rule[0]) found.push([s / whole, `${rule[1]} ${percent(s / whole)} of the time: ${rule[2]}`]);
  }
  for (const [tier, tables] of Object.entries(unread(model))) found.push([2, `${TIERS[tier]} not read after failures (${tables.join(", ")}): see the warnings`]);
  for (const table of model.tables) {
    const was = before?.tables.find((t) => t.name === table.name) ?? null, f = tableFigures(table, was, seconds);
    if (f.keys < LEAST_KEYS) continue;
    const deferred = (table.deferred - (was?.deferred ?? 0)) / f.keys, rate = f.rates.embedding_cache;
    if (f.defaults >= 0.1) found.push([f.defaults, `${table.name}: ${percent(f.defaults)} unknown keys: is the model old, or another one than the clients'?`]);
    if (deferred >= 0.001) found.push([deferred, `${table.name}: ${percent(deferred)} default vectors for keys that a tier may have: hit_rate_threshold above 1`]);
    if (rate !== null && rate < 0.5 && f.evictionsPerS > 0) found.push([1 - rate, `${table.name}: cache hits ${percent(rate)}, and it is full: raise gpucacheper`]);
  }
  return found.sort((a, b) => b[0] - a[0]).slice(0, 5).map(([, text]) => text);
}

const LEAST_KEYS = 100;
const STAGE_ADVICE = { // from which share of the lookups' time on
  wait: [0.1, "wait", "more workspaces (num_of_worker_buffer_in_pool)"],
  adopt: [0.2, "adopt", "send contiguous int64 keys"],
  volatile_db: [0.4, "volatile", "a larger cache (gpucacheper), or more fetch_threads"],
  persistent_db: [0.3, "persistent", "a larger cache or volatile database"],
  coalesced: [0.3, "coalesced", "lookups wait for the same missing keys: a larger cache (gpucacheper)"],
};

export function count(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    const divisor = unit === "k" ? 1e3 : size;
    if (Math.abs(n) >= size) return `${(n / divisor).toFixed(n / divisor < 100 ? 1 : 0)} ${unit}`;
  }
  return n > 0 && n < 10 && n % 1 ? n.toFixed(1) : Math.round(n).toLocaleString("en");
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${(n / size).toFixed(n / size < 100 ? 1 : 0)} ${unit}`;
  }
  return `${n} B`;
}

export function time(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1e-3) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.1 ? 2 : 0)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 && s % 1 ? 1 : 0)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : s < 172800 ? `${(s / 3600).toFixed(0)} h` : `${(s / 86400).toFixed(0)} d`;
}

export const ago = (s) => (s < 2 ? "just now" : `${time(Math.round(s))} ago`);

// A time left, to the second.
export function clock(s) {
  const whole = Math.ceil(s), parts = [[Math.floor(whole / 3600), "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  return parts.filter(([n]) => n).slice(0, 2).map(([n, unit]) => `${n} ${unit}`).join(" ") || "0 s";
}

export const portion = (share) => `${Number((100 * share).toPrecision(3))} %`;

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share === 0 || share === 1 ? 0 : share > 0.995 || share < 0.005 ? 2 : 1)} %`;
}
