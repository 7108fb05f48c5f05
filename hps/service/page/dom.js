// Shared by both pages: elements made from plain text, requests with the token, the theme.

// An element; strings become text, never markup.
export function h(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  Object.assign(made, properties);
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

export const $ = (id) => document.getElementById(id);

let token = sessionStorage.getItem("hps.token") || "";

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function ask(path, signal) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  const body = await answer.json().catch(() => ({}));
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
