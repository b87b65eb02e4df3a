// Classify: every picture has its own card, on which its answer can be explained and corrected.

import { $, button, call, count, icon, make, paragraph, picture, say, span, sureness } from "./base.js";
import { known, model } from "./model.js";
import { chosen, drawWhole, paint } from "./pictures.js";
import { lessonOf, teachMore } from "./teach.js";

const AT_ONCE = 4; // pictures asked about at the same time; the server batches them
const TOP = 5;
const SURE = 0.98; // from here on the others say nothing
const WORTH_A_BAR = 0.01;

const corrections = new Map(); // card → { file, label }, where the server keeps none itself

/** Ask about some pictures, a few at a time; every picture has its own card, and its own error if it comes to that. */
export async function takePictures(files) {
  if (!files.length) return;
  const jobs = files.map((file) => ({ file, card: make("li", { class: "card" }) }));
  $("results").prepend(...jobs.map(({ card }) => card));
  for (const { file, card } of jobs) waiting(card, file);
  countAnswers();
  $("results-head").scrollIntoView({ block: "nearest" });

  const told = [];
  const queue = [...jobs.entries()];
  const work = async () => {
    for (let next = queue.shift(); next; next = queue.shift()) {
      const [place, { file, card }] = next;
      told[place] = await ask(card, file);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  say(told.length > 3 ? count(told.length, "answer") : told.join(" "));
}

async function ask(card, file) {
  card.setAttribute("aria-busy", "true");
  try {
    const form = new FormData();
    form.append("images", file, file.name || "pasted.png");
    const { answers } = await call("POST", `predict?top_k=${TOP}`, form);
    return answered(card, file, answers[0]);
  } catch (error) {
    return refused(card, file, error);
  } finally {
    card.removeAttribute("aria-busy");
  }
}

const fileName = (file) => file.name || "pasted picture";

/** Fill a card: the picture, a heading and words beside it, more below. The drawn picture stays. */
function fill(card, file, kind, heading, words, ...below) {
  let thumb = card.querySelector(".thumb");
  if (!thumb) {
    thumb = make("canvas", { class: "thumb", role: "img", "aria-label": fileName(file) });
    paint(thumb, file);
  }
  card.className = `card ${kind}`;
  const name = make("p", { class: "file", title: fileName(file) }, fileName(file));
  const beside = make("div", { class: "card-words" }, name, heading, ...words);
  card.replaceChildren(make("div", { class: "card-top" }, thumb, beside), ...below);
}

function waiting(card, file) {
  fill(card, file, "waiting", make("h3", {}, "Looking…"), []);
}

function answered(card, file, answer) {
  const none = answer.label === null;
  const best = answer.top[0];
  const heading = none
    ? make("h3", {}, icon("none"), "None of these")
    : make("h3", {}, answer.label, " ", span("sure", sureness(answer.probability)));
  const nearest = best ? ` The nearest would be ${best.label}.` : "";
  const words = none ? [paragraph("why", `Not like anything it knows well enough.${nearest}`)] : [];
  const rows = answer.top.filter(({ probability }, place) => place === 0 || probability >= WORTH_A_BAR);
  const below = none || rows.length < 2 || answer.probability >= SURE ? [] : [bars(rows)];
  fill(card, file, none ? "none" : "known", heading, words, ...below, actions(card, file, answer));
  const named = none ? "none of these" : `${answer.label}, ${sureness(answer.probability)}`;
  return `${fileName(file)}: ${named}.`;
}

function bars(top) {
  const rows = top.map(({ label, probability }) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("span"));
    bar.firstChild.style.width = `${100 * probability}%`;
    return make("li", {}, span("bar-name", label), bar, span("bar-value", sureness(probability)));
  });
  return make("ol", { class: "bars", "aria-label": "What it may be" }, ...rows);
}

/** What can be done about an answer: see why, and say that it is wrong. */
function actions(card, file, answer) {
  const why = button("quiet", `Why? ${fileName(file)}`, "Why?");
  why.setAttribute("aria-expanded", "false");
  why.onclick = () => explain(card, file, answer, why);
  const wrong = button("quiet", `Wrong? ${fileName(file)}`, "Wrong?");
  wrong.setAttribute("aria-expanded", "false");
  wrong.onclick = () => offerCorrection(card, file, answer, wrong);
  return make("div", { class: "card-actions" }, why, wrong);
}

/** Show, or put away, where on the picture the model looked. */
async function explain(card, file, answer, opener) {
  const shown = card.querySelector(".heat");
  opener.setAttribute("aria-expanded", String(!shown));
  if (shown) return shown.remove();
  const about = answer.task === null ? "" : ` It is most like the pictures of “${answer.task}”.`;
  const words = paragraph("why", "Looking again…");
  const canvas = make("canvas", { role: "img", "aria-label": `Where it looked on ${fileName(file)}` });
  const part = make("div", { class: "heat" }, words);
  card.append(part);
  try {
    drawWhole(canvas, await picture("POST", "explain", new Blob([file], { type: file.type || "image/jpeg" })));
    words.textContent = `Bright is where it looked.${about}`;
    part.prepend(canvas);
  } catch (error) {
    words.textContent = `${error.message}${about}`;
  }
  say(words.textContent);
}

let forms = 0;

/** Ask what a picture shows instead. */
function offerCorrection(card, file, answer, opener) {
  const shown = card.querySelector(".correct");
  opener.setAttribute("aria-expanded", String(!shown));
  if (shown) return shown.remove();
  const id = `correct-${++forms}`;
  const input = make("input", { type: "text", id, autocomplete: "off", maxLength: 100, required: true });
  input.setAttribute("list", "class-names");
  const send = make("button", { type: "submit", class: "button" }, "Correct");
  const said = make("p", { class: "remark", role: "alert" });
  const form = make("form", { class: "correct" }, make("label", { htmlFor: id }, "It is"), input, send, said);
  form.noValidate = true;
  form.onsubmit = async (event) => {
    event.preventDefault();
    said.textContent = "";
    try {
      await correct(card, file, answer, input.value.trim(), said);
    } catch (error) {
      said.textContent = error.message;
    }
  };
  card.append(form);
  input.focus();
}

/** Note what a picture really shows: at the server where it keeps such pictures, else here until they are taught. */
async function correct(card, file, answer, label, said) {
  if (!label) return void (said.textContent = "Say what it is.");
  if (!known(label)) {
    const teach = make("a", { href: "#teach" }, "Teach it as a new class");
    teach.onclick = () => lessonOf(label, [file]);
    return said.replaceChildren(`It does not know “${label}” yet. `, teach, ".");
  }
  if (model.review_days) {
    const form = new FormData();
    form.append("label", label);
    form.append("answered", answer.label ?? "");
    form.append("images", file, file.name || "pasted.png");
    await call("POST", "review", form);
  } else {
    corrections.set(card, { file, label });
  }
  card.querySelector(".correct")?.remove();
  card.querySelector(".card-actions")?.remove();
  const where = model.review_days ? "It waits under Review." : "Teach it, so that it is remembered.";
  card.append(paragraph("corrected", icon("check"), ` It is ${label}. ${where}`));
  countCorrections();
  say(`Corrected: it is ${label}.`);
}

function countCorrections() {
  const number = corrections.size;
  $("corrections").hidden = number === 0;
  $("corrections-text").textContent = `${count(number, "correction")} to be taught.`;
}

async function teachCorrections() {
  const taken = [...corrections];
  corrections.clear(); // so that nobody teaches them twice meanwhile
  countCorrections();
  location.hash = "teach";
  if (await teachMore(taken.map(([, { file, label }]) => ({ name: label, files: [file] })))) return;
  for (const [card, one] of taken) corrections.set(card, one); // they can be taught later
  countCorrections();
}

function refused(card, file, error) {
  const again = button("quiet", `Try again: ${fileName(file)}`, "Try again");
  again.onclick = () => {
    waiting(card, file);
    ask(card, file).then(say);
  };
  const heading = make("h3", {}, icon("alert"), "No answer");
  fill(card, file, "bad", heading, [paragraph("why", error.message), again]);
  return `${fileName(file)}: ${error.message}`;
}

function countAnswers() {
  const number = $("results").children.length;
  $("results-count").textContent = number;
  $("results-head").hidden = number === 0;
  $("classify-drop").classList.toggle("compact", number > 0);
}

export function wireClassify() {
  $("corrections-teach").onclick = teachCorrections;
  $("classify-files").onchange = (event) => {
    takePictures(chosen(event.target).map(({ file }) => file));
    event.target.value = ""; // the same file may be chosen again
  };
  $("results-clear").onclick = () => {
    $("results").replaceChildren();
    corrections.clear();
    countCorrections();
    countAnswers();
    $("classify-files").focus();
    say("Answers cleared.");
  };
}
