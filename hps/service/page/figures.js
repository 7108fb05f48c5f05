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
  return all.slice(1).reduce((sum, one) => ({
    count: sum.count + one.count,
    total_s: sum.total_s + one.total_s,
    buckets: sum.buckets.map(([bound, n], i) => [bound, n + one.buckets[i][1]]),
  }), all[0]);
}

const modelsOf = (answer) => answer.server?.models ?? [];
export const modelIn = (answer, name) => modelsOf(answer).find((one) => one.name === name);

// Figures of one table between two answers; `before` may lack it.
export function tableFigures(table, before, seconds) {
  const since = (get) => get(table) - (before ? get(before) : 0);
  const rates = {};
  for (const tier of Object.keys(TIERS)) {
    const sum = (what) => (one) => one.tiers.filter((t) => t.tier === tier).reduce((n, t) => n + (t[what] ?? 0), 0);
    const hits = since(sum("hits")), asked = hits + since(sum("misses"));
    rates[tier] = table.tiers.some((t) => t.tier === tier) && asked > 0 ? hits / asked : null;
  }
  const keys = since((one) => one.keys);
  const evictions = since((one) => one.tiers.reduce((n, t) => n + (t.evictions ?? 0), 0));
  return { keys, rates, keysPerS: keys / seconds, evictionsPerS: evictions / seconds,
    defaults: keys > 0 ? since((one) => one.defaults) / keys : null };
}

// Figures of the server between two answers.
export function overview(now, before, seconds) {
  const of = (answer) => added(modelsOf(answer).map((one) => one.lookups));
  const latency = of(now), earlier = modelsOf(now).length === modelsOf(before).length ? of(before) : null;
  const sum = (answer, get) => modelsOf(answer).flatMap((one) => one.tables).reduce((n, one) => n + get(one), 0);
  const cache = (what) => (table) => table.tiers.filter((t) => t.tier === "embedding_cache").reduce((n, t) => n + t[what], 0);
  const since = (get) => Math.max(0, sum(now, get) - sum(before, get));
  const hits = since(cache("hits")), asked = hits + since(cache("misses"));
  return {
    lookups: Math.max(0, latency.count - of(before).count) / seconds,
    keys: since((one) => one.keys) / seconds,
    p50: quantile(latency, earlier, 0.5), p95: quantile(latency, earlier, 0.95), p99: quantile(latency, earlier, 0.99),
    hitRate: asked > 0 ? hits / asked : null,
  };
}

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
  if (s < 120) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  return s < 7200 ? `${(s / 60).toFixed(0)} min` : s < 172800 ? `${(s / 3600).toFixed(0)} h` : `${(s / 86400).toFixed(0)} d`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share === 0 || share === 1 ? 0 : share > 0.995 || share < 0.005 ? 2 : 1)} %`;
}
