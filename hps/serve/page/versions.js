// Cards of versions on trial: held by their checks, or in a canary or shadow beside the serving version.

import { button } from "./actions.js";
import { cell, h, table } from "./dom.js";
import { ago, clock, count, percent, portion, time } from "./figures.js";

const RECENT_S = 3600;
const NOISE_MS = 1; // shorter times break no bound

export function trials(answer) {
  const models = answer.server?.models ?? [];
  return models.flatMap((model) => [...rollouts(model, answer.time_s), ...held(model, answer.time_s)]);
}

function card(model, kind, state, about, ...rest) {
  const made = h("div.card", {}, h("div.head", {}, h("h3", {}, model.name), h(`span.chip.${kind}`, {}, state), h("span.soft", {}, about)), ...rest);
  made.dataset.trial = model.name;
  return made;
}

const buttons = (...made) => (made.some(Boolean) ? h("div.buttons", {}, ...made) : null);

// -- checks ---------------------------------------------------------------------------------------------------------------

// The results of the checks of a version in a line.
export const checked = (checks, now) => `${checks.verdict}${checks.against ? ` beside version ${checks.against}` : ""}, ${ago(now - checks.at)}: `
  + [[checks.failed.length, "failed"], [checks.passed, "passed"], [checks.skipped, "skipped"]].filter(([n]) => n).map(([n, what]) => `${n} ${what}`).join(", ");

function held(model, now) {
  const versions = new Set(model.versions.filter(([, state]) => state === "held").map(([version]) => version));
  const running = model.rollout?.state === "running" ? model.rollout.version : "";
  return (model.checks ?? []).filter((checks) => versions.has(checks.version) && checks.version !== running).map((checks) => card(model, "fair", `version ${checks.version} held`,
    `${checked(checks, now).replace(/^held /, "")}. It answers only requests that name it.`,
    table("Failed checks", ["failed check", "found"], checks.failed.map((found) => h("tr", {}, cell(found.table ? `${found.check} of ${found.table}` : found.check), cell(found.text, "text")))),
    buttons(button("accept", model.name, `Accept ${checks.version}…`, checks.version), button("canary", model.name, "Start a canary…", checks.version))));
}

// -- canary and shadow ----------------------------------------------------------------------------------------------------

function rollouts(model, now) {
  const it = model.rollout;
  if (!it) return [];
  const ended = Date.parse(it.since) / 1000 + it.seconds, running = it.state === "running", over = !running && it.state !== "loading";
  if (over && now - ended > RECENT_S && !(it.reason && it.serving === model.version)) return [];
  const isHeld = model.versions.some(([version, state]) => version === it.version && state === "held");
  const kind = running ? "now" : it.state === "promoted" ? "good" : it.state === "rolled back" ? "bad" : "fair";
  const about = `version ${it.version} beside ${it.serving}, ${over ? `${ago(now - ended)}, by ${it.by || "itself"}` : `for ${time(it.seconds)}`}`;
  const state = running ? `${it.mode} ${portion(it.share)}` : `${it.mode} ${it.state}`;
  return [card(model, kind, state, about, running ? null : it.reason ? h("p.bad.reason", {}, it.reason) : null,
    running ? progress(it) : null, sides(it), compared(it),
    running && isHeld ? h("p.fair", {}, `The checks of version ${it.version} hold it; to promote it is to accept it.`) : null,
    running ? buttons(button(isHeld ? "promoteHeld" : "promote", model.name, `Promote ${it.version}…`, it.version), button("stop", model.name, `Stop ${it.version}…`, it.version)) : null)];
}

// The steps as a line of segments, and the time that is left.
function progress(it) {
  const header = it.header ? `; sides by the header ${it.header}` : "", steps = it.steps ?? [];
  if (it.step >= steps.length) return h("p.soft", {}, `${portion(it.share)} until it is promoted or stopped${header}`);
  const current = steps[it.step - 1], left = Math.max(0, current.seconds - it.step_seconds);
  const whole = left + steps.slice(it.step).reduce((sum, step) => sum + step.seconds, 0);
  const line = h("ol.steps", {}, ...steps.map((step, i) => {
    const part = h(`li.${i + 1 < it.step ? "done" : i + 1 === it.step ? "current" : "later"}`, {}, h("span", {}, portion(step.share)), h("i"));
    part.lastChild.style.setProperty("--done", `${i + 1 < it.step ? 100 : i + 1 === it.step && step.seconds ? Math.min(100, (100 * it.step_seconds) / step.seconds) : 0}%`);
    if (i + 1 === it.step) part.ariaCurrent = "step";
    return part;
  }));
  const few = current.requests ? `, at least ${count(current.requests)} requests` : "";
  return h("div", {}, line, h("p.soft", {}, `step ${it.step} of ${steps.length}, ${clock(left)} left${few}; ${clock(whole)} until ${portion(steps.at(-1).share)}${header}`));
}

function sides(it) {
  const [old, fresh] = [it.serving, it.version].map((version) => it.versions.find((side) => side.version === version) ?? {});
  const { bounds = {} } = it, ms = (value) => (value === null || value === undefined ? "–" : time(value / 1000));
  const rows = [
    ["requests", count(old.requests), count(fresh.requests), bounds.least_requests ? `≥ ${count(bounds.least_requests)}` : "", false],
    ["errors", percent(old.error_rate), percent(fresh.error_rate), bounds.error_rate == null ? "" : `≤ +${portion(bounds.error_rate)}`, fresh.error_rate > old.error_rate + bounds.error_rate],
    ["p50", ms(old.p50_ms), ms(fresh.p50_ms), "", false],
    ["p99", ms(old.p99_ms), ms(fresh.p99_ms), bounds.p99_factor == null ? "" : `≤ × ${bounds.p99_factor}`, bounds.p99_factor && fresh.p99_ms > Math.max(NOISE_MS, bounds.p99_factor * old.p99_ms)],
  ];
  if (it.compared?.difference != null) {
    rows.push(["difference", "", it.compared.difference.toPrecision(2), bounds.difference == null ? "" : `≤ ${bounds.difference}`, bounds.difference != null && it.compared.difference > bounds.difference]);
  }
  return table("Figures by version", ["", `version ${it.serving}`, `version ${it.version}`, "bound"], rows.map(([name, was, is, bound, broken]) =>
    h("tr", {}, h("th", { scope: "row" }, name), cell(was), cell(is, broken ? "bad" : ""), cell(bound))));
}

function compared(it) {
  const both = it.compared;
  if (!both?.requests) return null;
  const more = [`${percent(both.identical / both.requests)} identical`, both.max_difference != null && `largest difference ${both.max_difference}`,
    both.correlation != null && `correlation ${both.correlation}`, both.failed && `${count(both.failed)} failed`, both.dropped && `${count(both.dropped)} dropped`];
  return h("p.soft", {}, `${count(both.requests)} requests answered by both: ${more.filter(Boolean).join(", ")}`);
}
