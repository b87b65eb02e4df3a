// What the parts of the page share: making elements, words for numbers, and talking to the server. Whatever comes from
// the server or from a file name is set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** Make an element: properties by name, `class`, `aria-*` and `data-*` as attributes, then children (text or nodes). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const span = (kind, ...children) => make("span", { class: kind }, ...children);
export const paragraph = (kind, ...children) => make("p", { class: kind }, ...children);

/** Make a button whose name for a screen reader says more than what is on it. */
export function button(kind, name, ...children) {
  return make("button", { type: "button", class: kind, "aria-label": name }, ...children);
}

export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(space, "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

/** Tell a screen reader. */
export function say(text) {
  $("live").textContent = "";
  setTimeout(() => ($("live").textContent = text), 50); // a change, even where the words are the same
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString()} ${number === 1 ? one : many}`;

export function percent(fraction) {
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value > 99.9) return CERTAIN;
  return `${value.toFixed(value === 100 || value === 0 ? 0 : 1)} %`;
}

const CERTAIN = "> 99.9 %";

/** A probability: never one that looks like certainty, whatever its rounding came to. */
export const sureness = (probability) => (probability >= 0.9995 ? CERTAIN : percent(probability));

export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 3; unit++) bytes /= 1000;
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

export function duration(milliseconds) {
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** How sure one can be of a share: its 95 % interval by Wilson, from 0 to 1. */
export function interval(right, all) {
  const z = 1.96;
  const [share, weight] = [right / all, 1 + (z * z) / all];
  const middle = (share + (z * z) / (2 * all)) / weight;
  const reach = (z * Math.sqrt((share * (1 - share)) / all + (z * z) / (4 * all * all))) / weight;
  return [Math.max(0, middle - reach), Math.min(1, middle + reach)];
}

/** "39 of 40 right (87 to 100 %)". */
export function rightOf(right, all) {
  const [low, high] = interval(right, all).map((value) => Math.round(100 * value));
  return `${right.toLocaleString()} of ${all.toLocaleString()} right (${low} to ${high} %)`;
}

/** The server's one-line errors begin small and end without a stop. */
export function sentence(text) {
  const begun = (text ?? "").replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()); // but not a file's name
  return begun.replace(/[^.!?…]$/, "$&.");
}

export const list = (words) => new Intl.ListFormat("en").format(words);

const NAMED = 10; // things that a sentence names

/** Some of many names, and how many more there are. */
export const some = (names) => list(names.length > NAMED ? [...names.slice(0, NAMED), `${(names.length - NAMED).toLocaleString()} more`] : names);

// Talking to the server

export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const noToken = () => new Refusal("This needs the server’s access token.", 401);

/** Ask the server; return its JSON. An object is sent as JSON. A refusal carries the server's own words, or friendly ones where it has none. */
export async function call(method, path, body = null, onSent = null) {
  for (;;) {
    if ((method !== "GET" && !/^(predict|explain)/.test(path)) || path.startsWith("review")) await needToken();
    const token = sessionStorage.getItem("token");
    const reply = await send(method, path, body, token, onSent);
    if (reply.status >= 200 && reply.status < 300) return reply.json;
    if (reply.status !== 401) throw new Refusal(sentence(reply.json?.error) || unexplained(reply.status), reply.status);
    const renewed = sessionStorage.getItem("token") !== token; // another request has asked meanwhile
    if (!renewed && !(await askToken(token !== null))) throw noToken();
  }
}

/** Whatever changes the model needs a token: ask for it, if there is none, before anything is sent in vain. */
export async function needToken() {
  if (sessionStorage.getItem("token") === null && !(await askToken(false))) throw noToken();
}

/** One request. XMLHttpRequest and not fetch, for it tells how much of an upload is sent. */
export function send(method, path, body, token, onSent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    if (token) request.setRequestHeader("Authorization", `Bearer ${token}`);
    if (onSent) request.upload.onprogress = (event) => onSent(event.loaded / event.total);
    const plain = body !== null && !(body instanceof FormData) && !(body instanceof Blob);
    if (plain) request.setRequestHeader("Content-Type", "application/json");
    request.onerror = () => reject(new Refusal("The server does not answer. Is it still running?"));
    request.onload = () => {
      let json = null;
      try {
        json = request.responseText ? JSON.parse(request.responseText) : null;
      } catch {
        json = null; // a proxy's error page: its status says enough
      }
      resolve({ status: request.status, json });
    };
    request.send(plain ? JSON.stringify(body) : body);
  });
}

export function unexplained(status) {
  if (status === 413) return "That is more than the server takes at once.";
  if (status === 429 || status === 503) return "The server is busy. Please try again in a moment.";
  return `The server could not do that (status ${status}).`;
}

let asking = null;

/** Ask for the token; however many requests wait for it, there is one dialog. Return whether there is a new one. */
export function askToken(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("token");
    $("token-title").textContent = wrong ? "That token was not accepted" : "Access token";
    $("token-value").value = "";
    sessionStorage.removeItem("token");
    dialog.returnValue = "no";
    dialog.onclose = () => {
      asking = null;
      const token = $("token-value").value.trim();
      const given = dialog.returnValue === "yes" && token !== "";
      if (given) sessionStorage.setItem("token", token);
      $("token-forget").hidden = !given;
      resolve(given);
    };
    dialog.showModal();
  });
  return asking;
}

/** Ask whether something is meant; return whether it is, and whether the box in the dialog was ticked. */
export function confirmed(title, text, yes, tick = null) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  $("confirm-yes").textContent = yes;
  $("confirm-no").textContent = yes === "Forget it" ? "Keep it" : "Cancel";
  $("confirm-tick-part").hidden = tick === null;
  $("confirm-tick-text").textContent = tick ?? "";
  $("confirm-tick").checked = false;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve({ yes: dialog.returnValue === "yes", ticked: $("confirm-tick").checked });
  });
}

/** A picture that the server makes, to be drawn on a canvas. */
export async function picture(method, path, body = null) {
  const headers = sessionStorage.getItem("token") ? { Authorization: `Bearer ${sessionStorage.getItem("token")}` } : {};
  const reply = await fetch(path, { method, headers, body });
  if (reply.ok) return createImageBitmap(await reply.blob());
  const said = await reply.json().catch(() => null);
  throw new Refusal(sentence(said?.error) || unexplained(reply.status), reply.status);
}
