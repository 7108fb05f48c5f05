// Changes of models by administrators: a dialog that confirms, asks for the token, and sends the request.

import { $, Refused, h, send } from "./dom.js";

const ANSWER_MS = 30000;
const LOCAL = ["127.0.0.1", "localhost", "[::1]"]; // the names of this machine that its server accepts changes from
let token = ""; // of an administrator: in no storage, gone with the page
let administration = "off", started = 0, wanted = null;
let pending = null; // {number, started, title} of a change that was sent, and the start of the process that makes it

// Follow what the server allows, and the outcome of the change that was sent.
export function follow(answer) {
  administration = answer.service.administration ?? "off";
  started = answer.server?.started;
  if (!pending) return;
  const change = answer.changes.find((entry) => entry.number === pending.number);
  if (started !== pending.started || (!change && answer.changes[0]?.number > pending.number)) { // only a model's last one is kept
    outcome(`${pending.title}: it has ended; the server's log has its outcome`, "soft");
    pending = null;
  }
  if (!pending || !change) return;
  if (change.status === undefined) return outcome(`${pending.title}: under way${change.rows ? `, ${change.rows.toLocaleString("en")} rows loaded` : ""}`, "soft");
  const serves = change.version ? `version ${change.version} serves` : "it is not in service";
  outcome(`${pending.title}: ${change.error ? `failed: ${change.error}` : `done after ${change.seconds.toFixed(1)} s; ${serves}`}`, change.error ? "bad" : "good");
  pending = null;
}

export const offered = () => administration === "loopback" ? LOCAL.includes(location.hostname) : administration !== "off";

// A button of an action on a model; empty where changes are off. Its listener is that of the page.
export function button(act, model, text, version = "") {
  if (!offered()) return null;
  const made = h("button", { type: "button" }, text);
  Object.assign(made.dataset, { act, of: model, version });
  return made;
}

function outcome(text, kind) {
  $("outcome").textContent = text;
  $("outcome").className = kind;
  $("outcome").hidden = false;
}

const field = (name, label, properties) => h("label", {}, `${label} `, h("input", { name, autocomplete: "off", ...properties }));
const canary = (version) => [
  h("label", {}, "Mode ", h("select", { name: "mode" }, h("option", { value: "canary" }, "canary: it answers its share"), h("option", { value: "shadow" }, "shadow: its answers are only compared"))),
  field("version", "Version", { value: version, placeholder: "the newest", inputMode: "numeric" }),
  field("share", "Share of requests, %", { value: "5", inputMode: "decimal", required: true }),
  field("steps", "Steps", { placeholder: "5%:10m,25%:10m,100%" }),
];
const number = (version) => [field("version", "Version", { value: version, placeholder: "the newest", inputMode: "numeric" })];
const none = () => [];
// By action: the words for its button, what it will do, its fields, and the change with its body.
const ACTIONS = {
  deploy: ["Deploy", "The version is loaded beside the serving one and checked, and then it takes over.", number,
    ({ version }) => ["deploy", { ...version && { version } }]],
  rollback: ["Roll back", "The previous version serves, and the model is pinned to it.", none, () => ["rollback", {}]],
  accept: ["Accept", "It serves, although its checks hold it, and the model is pinned to it.", none, (_, version) => ["accept", { version, accept: true }]],
  unpin: ["Unpin", "The newest version that the model's policy selects serves.", none, () => ["unpin", {}]],
  canary: ["Start", "The version is loaded beside the serving one, and answers a share of the requests.", canary,
    ({ mode, version, share, steps }, held) => ["canary", { [mode]: percentage(share), ...version && { version }, ...steps && { steps: parsed(steps) }, ...held && version === held && { accept: true } }]],
  promote: ["Promote", "It answers all requests.", none, () => ["promote", {}]],
  promoteHeld: ["Promote", "It answers all requests, although its checks hold it.", none, () => ["promote", { accept: true }]],
  stop: ["Stop", "It is taken out. The serving version answers all requests.", none, () => ["rollback", {}]],
};

// The route of a change and its body: replicas of a fleet change together, except that each reads what was accepted.
function routed(change, body, fleet) {
  if (change === "accept") return ["deploy", fleet ? { accept: true } : body];
  return fleet ? ["fleet", { change, ...body }] : [change === "canary" ? "deploy" : change, body];
}

function percentage(text) {
  const share = Number(text.replace("%", "")) / 100;
  if (!(share > 0 && share <= 1)) throw new Error(`share: got ${text}, expected more than 0 and at most 100 %`);
  return Number(share.toPrecision(12));
}

function parsed(steps) {
  return steps.split(",").map((step) => {
    const found = /^\s*([\d.]+)\s*%\s*(?::\s*([\d.]+)\s*([smh]))?\s*$/.exec(step);
    if (!found) throw new Error(`steps: got ${step}, expected a share and a time, as in 5%:10m`);
    return { share: percentage(found[1]), ...found[2] && { seconds: Number(found[2]) * { s: 1, m: 60, h: 3600 }[found[3]] } };
  });
}

// Show the dialog of an action. fleet: whether the model's replicas follow a serving document.
export function ask({ act, of: model, version }, fleet) {
  const [verb, text, fields] = ACTIONS[act];
  const what = { canary: "a trial of" }[act] ?? "";
  const title = act === "rollback" && version ? `${verb} ${model} to version ${version}` // again would return to the version that was left
    : [verb, what, act !== "canary" && version && `version ${version} of`, model].filter(Boolean).join(" ");
  wanted = { act, model, version, fleet, title };
  $("act-title").textContent = `${title}?`;
  $("act-text").textContent = `${text}${fleet && act !== "accept" ? " This changes all replicas of the fleet." : ""} Server: ${location.host}.`;
  $("act-fields").replaceChildren(...fields(version));
  $("act-do").textContent = title;
  error("");
  show();
  $("act").showModal();
  (document.querySelector("#act-fields input") ?? ($("act-secret").hidden ? $("act-cancel") : $("act-token"))).focus();
}

function show() {
  $("act-secret").hidden = administration === "loopback" || token !== "";
  $("act-token").required = administration === "token" && token === "";
  $("act-kept").hidden = token === "";
}

function error(text) {
  $("act-error").textContent = text;
}

function forget() {
  token = $("act-token").value = "";
  show();
}

async function go(event) {
  event.preventDefault();
  const { act, model, version, fleet, title } = wanted;
  token ||= $("act-token").value.trim();
  $("act-token").value = "";
  $("act-do").disabled = true;
  error("");
  try {
    const values = Object.fromEntries([...new FormData($("act-form"))].map(([name, value]) => [name, value.trim()]));
    const [route, body] = routed(...ACTIONS[act][3](values, version), fleet);
    const answer = await send(`v1/models/${encodeURIComponent(model)}/${route}${route === "fleet" ? "" : "?wait=false"}`, body, token, AbortSignal.timeout(ANSWER_MS));
    $("act").close();
    if (answer.number !== undefined && route !== "fleet") {
      pending = { number: answer.number, started, title };
      outcome(`${title}: under way`, "soft");
    } else {
      outcome(`${title}: written${answer.reason ? `; ${answer.reason}` : ""}`, "good");
    }
  } catch (failure) {
    if (failure instanceof Refused && [401, 403].includes(failure.status)) forget();
    error(failure instanceof Refused || failure.constructor === Error ? failure.message : "The server does not answer; the change may have been made.");
  } finally {
    $("act-do").disabled = false;
    show();
  }
}

$("act-form").addEventListener("submit", go);
$("act-cancel").addEventListener("click", () => $("act").close());
$("act-forget").addEventListener("click", forget);
