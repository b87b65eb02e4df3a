// Review: pictures that it was unsure of or that people corrected, kept by the server for a while to be named.

import { $, button, call, count, icon, make, paragraph, picture, say } from "./base.js";
import { model, moment } from "./model.js";
import { teachReviewed } from "./teach.js";

/** Show the queue. */
export async function drawReview() {
  $("review-said").hidden = true;
  try {
    const { items, days } = await call("GET", "review");
    const named = items.filter(({ label }) => label !== null).length;
    $("review-lead").textContent = `Each is deleted once it is learned, and after ${count(days ?? 0, "day")} in any case.`;
    $("review-empty").hidden = items.length > 0;
    $("review-learn").hidden = named === 0;
    $("review-learn").textContent = `Learn ${count(named, "named picture")}`;
    $("review-list").replaceChildren(...items.map(card));
  } catch (error) {
    complain(error);
  }
}

function complain(error) {
  $("review-said-text").textContent = error.message;
  $("review-said").hidden = false;
}

function card(item) {
  const canvas = make("canvas", { class: "thumb", role: "img", "aria-label": item.name });
  picture("GET", `review/${item.id}/image`).then((bitmap) => draw(canvas, bitmap), () => {});
  const id = `review-${item.id}`;
  const input = make("input", { type: "text", id, autocomplete: "off", maxLength: 100, value: item.label ?? "" });
  input.setAttribute("list", "class-names");
  const save = make("button", { type: "submit", class: "button" }, item.label === null ? "Save" : "Change");
  const said = make("p", { class: "remark", role: "alert" });
  const form = make("form", { class: "correct" }, make("label", { htmlFor: id }, "It is"), input, save, said);
  form.onsubmit = (event) => {
    event.preventDefault();
    name(item, input.value.trim(), said);
  };
  const remove = button("quiet icon-button", `Delete ${item.name}`, icon("bin"));
  remove.onclick = async () => {
    await call("DELETE", `review/${item.id}`).catch(complain);
    await drawReview();
    $("review-title").focus();
  };
  const was = item.answered === null ? "It said “none of these”" : `It said ${item.answered}`;
  const why = item.why === "wrong" ? `${was}, which is wrong.` : `${was}${item.answered === null ? "." : ", and was unsure."}`;
  const words = make("div", { class: "card-words" }, paragraph("file", item.name), paragraph("why", why), paragraph("hint", moment(item.added)));
  const top = make("div", { class: "card-top" }, canvas, words, remove);
  return make("li", { class: `card${item.label === null ? "" : " known"}` }, top, form);
}

function draw(canvas, bitmap) {
  const side = Math.min(bitmap.width, bitmap.height);
  canvas.width = canvas.height = 224;
  canvas.getContext("2d").drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, 224, 224);
  bitmap.close();
}

async function name(item, label, said) {
  if (label && !model.classes.includes(label)) return void (said.textContent = `It does not know “${label}”. Teach it as a new class first.`);
  try {
    await call("POST", `review/${item.id}`, { label: label || null });
  } catch (error) {
    return void (said.textContent = error.message);
  }
  await drawReview();
  say(label ? `Noted: ${label}.` : "Unnamed.");
  $("review-title").focus();
}

export function wireReview() {
  $("review-learn").onclick = teachReviewed;
}
