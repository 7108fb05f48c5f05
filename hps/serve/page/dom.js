// Shared by both pages: elements made from plain text, requests with the token, the theme.

// Make an element; strings become text, never markup.
export function h(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  Object.assign(made, properties);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const cell = (text, kind) => h(kind ? `td.${kind}` : "td", {}, text);

// A table that scrolls within itself; `name` is for screen readers. A head above cells of text is on their side.
export const table = (name, heads, rows) => h("div.scroll", { tabIndex: 0, role: "region", ariaLabel: name }, h("table", {},
  h("thead", {}, h("tr", {}, ...heads.map((text, i) => h(rows[0]?.children[i]?.classList.contains("text") ? "th.text" : "th", { scope: "col" }, text)))), h("tbody", {}, ...rows)));

// Give an element these children by changing the present ones, so that scrolling, selections and open details survive.
export function show(parent, ...children) {
  const wanted = children.filter((child) => child !== null && child !== undefined);
  wanted.forEach((child, i) => (i < parent.childNodes.length ? renew(parent.childNodes[i], child) : parent.append(child)));
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function renew(old, wanted) {
  if (typeof wanted === "string") wanted = document.createTextNode(wanted);
  if (old.nodeName !== wanted.nodeName) return old.replaceWith(wanted);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  for (const name of old.getAttributeNames()) if (name !== "open" && !wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const name of wanted.getAttributeNames()) {
    if (old.getAttribute(name) === wanted.getAttribute(name)) continue;
    if (name === "style") old.style.cssText = wanted.style.cssText; // the security policy refuses the attribute
    else old.setAttribute(name, wanted.getAttribute(name));
  }
  show(old, ...wanted.childNodes);
}

export const $ = (id) => document.getElementById(id);

let token = sessionStorage.getItem("hps.token") || "";

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Send a request with the token.
export function call(path, more) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  return fetch(path, { headers, cache: "no-store", ...more });
}

export const request = (path, signal) => read(call(path, { signal }));

// POST an object with another token than the page's; with the page's if it is empty.
export function send(path, body, other, signal) {
  const headers = { "content-type": "application/json", ...(other || token) && { authorization: `Bearer ${other || token}` } };
  return read(call(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

async function read(coming) {
  const answer = await coming, body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body.error || `status ${answer.status}`);
  return body;
}

// Show the token form, and call `then` when a token is entered.
export function wantToken(then) {
  const form = $("login");
  form.hidden = false;
  $("token").focus();
  form.onsubmit = (event) => {
    event.preventDefault();
    token = $("token").value.trim();
    sessionStorage.setItem("hps.token", token);
    form.hidden = true;
    then();
  };
}

export const hasToken = () => token !== "";

const dark = matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "light", "dark"];

function paint() {
  const chosen = localStorage.getItem("hps.theme") || "auto";
  document.documentElement.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
  $("theme").textContent = `Theme: ${chosen}`;
}

dark.addEventListener("change", paint);
$("theme").addEventListener("click", () => {
  const chosen = localStorage.getItem("hps.theme") || "auto";
  localStorage.setItem("hps.theme", themes[(themes.indexOf(chosen) + 1) % themes.length]);
  paint();
});
paint();
