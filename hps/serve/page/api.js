// The page at `/docs`: the routes of openapi.json, with their fields and a curl line each.

import { $, Refused, request, call, h, hasToken, wantToken } from "./dom.js";

const METHODS = ["get", "post", "put", "delete"];

async function load() {
  try {
    show(await request("openapi.json"));
  } catch (error) {
    $("notice").textContent = error instanceof Refused && error.status === 401 && !hasToken() ? "" : `The description cannot be read: ${error.message}`;
    $("notice").hidden = !$("notice").textContent;
    if (error instanceof Refused && error.status === 401) wantToken(() => { $("notice").hidden = true; load(); });
  }
}

function show(api) {
  const resolve = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema);
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((known) => methods[known])) {
      const group = methods[method].tags?.[0] ?? "other";
      groups.set(group, [...(groups.get(group) ?? []), [method, path, methods[method]]]);
    }
  }
  $("about").textContent = `HTTP API · ${api.info.version}`;
  $("main").replaceChildren(h("p", {}, api.info.description), ...[...groups].map(([name, routes]) =>
    h("section", {}, h("h2", {}, name), ...routes.map((route) => operation(resolve, ...route)))));
}

function operation(resolve, method, path, it) {
  const body = resolve(it.requestBody?.content?.["application/json"]?.schema);
  const answers = Object.entries(it.responses).map(([status, answer]) => [status, answer.description, resolve(answer.content?.["application/json"]?.schema)]);
  return h("details.card", {},
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), ` ${it.summary ?? ""}`),
    it.description ? h("p", {}, it.description) : null,
    h("pre", {}, h("code", {}, curl(method, path, body))),
    it.parameters?.length ? fields("Parameter", it.parameters.map((field) => [field.name, field.required, resolve(field.schema), field.description])) : null,
    body?.properties ? fields("Request", listed(body)) : null,
    tried(method, path, it, body),
    fields("Answer", answers.map(([status, text]) => [status, true, null, text])),
    ...answers.filter(([status, , schema]) => status < 300 && schema?.properties).map(([, , schema]) => fields("Field of the answer", listed(schema))));
}

const listed = (schema) => Object.entries(schema.properties).map(([name, field]) => [name, schema.required?.includes(name), field, field.description]);

function kind(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(kind).filter((type) => type !== "null").join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.enum ? schema.enum.join(" | ") : schema.type ?? "";
}

function fields(title, rows) {
  const typed = rows.some(([, , schema]) => schema);
  return h("div.scroll", { tabIndex: 0 }, h("table.fields", {},
    h("thead", {}, h("tr", {}, h("th", {}, title), typed ? h("th.text", {}, "type") : null, h("th.text", {}, "meaning"))),
    h("tbody", {}, ...rows.map(([name, required, schema, text]) => h("tr", {}, h("td", {}, h("code", {}, name), required ? "" : " (optional)"),
      typed ? h("td.text", {}, kind(schema)) : null, h("td.text", {}, text ?? ""))))));
}

function curl(method, path, body) {
  const data = body?.example ? ` -d '${JSON.stringify(body.example)}'` : "";
  return `curl -s${method === "get" || data ? "" : ` -X ${method.toUpperCase()}`} ${location.origin}${path}${data}`;
}

// A form that sends the request from this page, and shows the answer.
function tried(method, path, it, body) {
  const inputs = (it.parameters ?? []).filter((parameter) => parameter.in !== "header").map((parameter) => {
    const input = h("input", { name: parameter.name, required: parameter.in === "path", autocomplete: "off", placeholder: parameter.in === "path" ? "" : "not sent" });
    return [parameter, input, h("label", {}, parameter.name, input)];
  });
  const text = it.requestBody ? h("textarea", { name: "body", rows: 4, spellcheck: false, value: body?.example ? JSON.stringify(body.example, null, 2) : "" }) : null;
  const shown = h("div", { role: "status" });
  const changes = method !== "get" && !/\/(lookup|infer|index)$/.test(path);
  const form = h("form.try", {}, ...inputs.map(([, , label]) => label), text ? h("label.wide", {}, "body, JSON", text) : null,
    h("button", {}, changes ? "Send: this changes the server" : "Send"), shown);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let to = path;
    const query = new URLSearchParams();
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path") to = to.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value !== "") query.set(parameter.name, input.value);
    }
    const url = `${to.slice(1)}${query.size ? `?${query}` : ""}`;
    shown.replaceChildren(h("p.soft", {}, "waiting for the answer"));
    try {
      const began = performance.now(), answer = await call(url, { method: method.toUpperCase(), body: text?.value || undefined });
      const ms = (performance.now() - began).toFixed(0), kind = answer.headers.get("content-type") ?? "";
      const content = /json|text/.test(kind) ? pretty(await answer.text()) : `${(await answer.arrayBuffer()).byteLength} bytes of ${kind}`;
      const lines = ["x-request-id", "x-deferred-keys"].map((name) => [name, answer.headers.get(name)]).filter(([, value]) => value);
      shown.replaceChildren(h(`p.${answer.ok ? "good" : "bad"}`, {}, `${answer.status} after ${ms} ms`),
        h("p.soft", {}, lines.map(([name, value]) => `${name}: ${value}`).join(", ")), h("pre", {}, h("code", {}, content)));
      if (answer.status === 401) wantToken(() => form.requestSubmit());
    } catch {
      shown.replaceChildren(h("p.bad", {}, "The server does not answer."));
    }
  });
  return h("details", {}, h("summary", {}, "Try it"), form);
}

const MOST_SHOWN = 20000;
function pretty(text) {
  const short = text.length > MOST_SHOWN ? `${text.slice(0, MOST_SHOWN)}\n… ${text.length - MOST_SHOWN} characters more` : text;
  return /-?\d{16,}/.test(text) || text.length > MOST_SHOWN ? short : parsed(text) ?? short; // JavaScript would change such numbers
}

function parsed(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

load();
