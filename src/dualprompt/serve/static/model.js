// Model: what it knows, how well, and everything that changes it without new classes: names, forgetting, undo.

import { $, button, call, confirmed, count, icon, make, paragraph, rightOf, say, size, some } from "./base.js";
import { chosen, classesOf, isPicture, order } from "./pictures.js";
import { teachMore } from "./teach.js";

const MANY = 12; // classes, from which on a search helps
const AT_ONCE = 4;
const UNREADABLE = [413, 422]; // what the server says of a picture that is too large, or none
const MOST_ROWS = 30; // of what was taken for what; a table of hundreds of classes is no help

export let model = null;

export const known = (name) => model?.classes.includes(name) ?? false;

/** Read what the model knows, and show it. */
export async function loadModel() {
  try {
    model = await call("GET", "model");
    $("offline").hidden = true;
  } catch (error) {
    $("offline-text").textContent = error.message;
    $("offline").hidden = false;
    return;
  }
  const { tasks, classes } = model;
  $("knows").textContent = classes.length ? count(classes.length, "class", "classes") : "nothing learned yet";
  $("version").textContent = `dualprompt ${model.version} · model ${model.model_version}`;
  $("token-forget").hidden = !sessionStorage.getItem("token");
  $("tab-review").hidden = !model.review_days;
  $("classify-empty").hidden = classes.length > 0;
  $("classify-hint").textContent = model.review_days
    ? `They are looked at. Those it is unsure of are kept for ${count(model.review_days, "day")}, for people to look at.`
    : "They are looked at and not kept.";
  $("model-empty").hidden = tasks.length > 0;
  for (const part of ["tasks-part", "test-part", "none-part"]) $(part).hidden = tasks.length === 0;
  $("class-names").replaceChildren(...classes.map((name) => make("option", { value: name })));
  drawFacts();
  drawTasks();
  drawThreshold();
  drawHeldOut();
  drawMatrix();
  if (!$("model").hidden) await Promise.all([drawVersions(), drawDrift()]);
}

/** A backbone or method may be told by its name or with its details; a file stands for itself without its folders. */
const called = (thing) => (thing.name ?? thing).split("/").at(-1);

function drawFacts() {
  const engine = model.engine?.name === "onnx" ? `ONNX Runtime${model.engine.int8 ? ", 8 bits" : ""}` : "PyTorch";
  const facts = [
    ["Classes", model.classes.length.toLocaleString()],
    ["Lessons", model.tasks.length.toLocaleString()],
    ["Size", size(model.bytes)],
    ["Backbone", called(model.backbone)],
    ["Method", called(model.method)],
    ["Computed by", engine],
  ];
  const rows = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
  $("facts").replaceChildren(...rows);
}

/** How many of the pictures held out were right, with the count and an interval where they are told. */
export function measured({ accuracy, held, correct }) {
  if (typeof accuracy !== "number") return "Too few pictures to measure how well";
  return held ? `${rightOf(correct, held)}, of pictures left out to measure it` : `${accuracy.toFixed(1)} % right`;
}

/** Whether a lesson was practised after the first look, and what that changed; "" where its method has no choice. */
function practised({ prompts }) {
  if (!prompts) return "";
  if (!prompts.held) return prompts.used ? "Practised" : "Learned at one look, without practice";
  const [before, after] = [prompts.without, prompts.with_prompts].map((right) => right.toLocaleString());
  const told = `of ${count(prompts.held, "picture")}, ${after} right with practice, ${before} without`;
  return prompts.used ? `Practised: ${told}` : `Learned at one look, as practice did not help: ${told}`;
}

// Lessons and classes

function drawTasks() {
  $("search-part").hidden = model.classes.length <= MANY;
  const wanted = $("search").value.trim().toLowerCase();
  const cards = model.tasks.map((task) => taskCard(task, wanted)).filter(Boolean);
  $("tasks").replaceChildren(...cards);
  $("search-none").hidden = cards.length > 0;
}

/** A lesson with its classes, those that are searched for; null where it has none of them. */
function taskCard(task, wanted) {
  const classes = task.classes.filter((name) => name.toLowerCase().includes(wanted));
  if (wanted && !classes.length && !task.name.toLowerCase().includes(wanted)) return null;
  const forget = button("quiet", `Forget the lesson ${task.name}`, icon("bin"), "Forget");
  forget.onclick = () => forgetIt(`Forget the lesson “${task.name}”?`, task.classes, `tasks/${encodeURIComponent(task.id)}`);
  const chips = (classes.length ? classes : task.classes).map((name) => {
    const open = button("chip-name", `Change the class ${name}`, name);
    open.onclick = () => openClass(name);
    const cross = button("chip-forget", `Forget the class ${name}`, icon("cross"));
    cross.onclick = () => forgetClass(name);
    return make("li", {}, open, cross);
  });
  const from = ` from ${count(task.images, "picture")} · ${size(task.bytes)}`;
  return make(
    "li",
    { class: "task" },
    make("div", { class: "row-head" }, make("h3", {}, task.name), forget),
    paragraph("task-facts", "Learned ", make("time", { dateTime: task.learned }, moment(task.learned)), from),
    paragraph("accuracy", measured(task)),
    ...(practised(task) ? [paragraph("practice", practised(task))] : []),
    make("ul", { class: "chips", "aria-label": `Classes of ${task.name}` }, ...chips),
  );
}

export function moment(text) {
  const date = new Date(typeof text === "number" ? text * 1000 : text.replace(/([+-]\d\d)(\d\d)$/, "$1:$2")); // not every browser reads +0000
  return isNaN(date) ? text : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** Do something that changes the model, and show what it knows then. */
async function change(work, done) {
  $("model-said").hidden = true;
  try {
    await work();
    say(done);
  } catch (error) {
    $("model-said-text").textContent = error.message;
    $("model-said").hidden = false;
  }
  await loadModel();
  $("model-title").focus();
}

async function forgetIt(title, names, path) {
  const text = `It will no longer answer ${some(names)}. All other answers stay as they are. You can undo this while earlier versions are kept.`;
  const { yes, ticked } = await confirmed(title, text, "Forget it", "For good: also remove the earlier versions that hold it");
  if (yes) await change(() => call("DELETE", `${path}${ticked ? "?purge=true" : ""}`), "Forgotten.");
}

const forgetClass = (name) => forgetIt(`Forget the class “${name}”?`, [name], `classes/${encodeURIComponent(name)}`);

let opened = null; // the class whose dialog is open

function openClass(name) {
  opened = name;
  $("class-title").textContent = name;
  $("class-name").value = name;
  const others = model.classes.filter((other) => other !== name);
  $("class-into").replaceChildren(...others.map((other) => make("option", { value: other }, other)));
  $("class-merge-part").hidden = others.length === 0;
  $("class").returnValue = "";
  $("class").showModal();
}

function wireClass() {
  const dialog = $("class");
  const act = (id, work) => {
    $(id).onclick = () => {
      dialog.close();
      work(opened);
    };
  };
  $("class-form").onsubmit = (event) => {
    event.preventDefault();
    const name = $("class-name").value.trim();
    dialog.close();
    if (name && name !== opened) change(() => call("POST", "rename", { old: opened, new: name }), `Renamed to ${name}.`);
  };
  act("class-close", () => {});
  act("class-forget", forgetClass);
  act("class-merge", async (name) => {
    const into = $("class-into").value;
    const text = `Pictures of both are answered with “${into}” from now on. You can undo this while earlier versions are kept.`;
    const { yes } = await confirmed(`Make “${name}” a part of “${into}”?`, text, "Merge them");
    if (yes) await change(() => call("POST", "merge", { classes: [name, into], into }), "Merged.");
  });
  $("class-more").onchange = async ({ target }) => {
    const files = chosen(target).map(({ file }) => file);
    target.value = "";
    dialog.close();
    if (!files.length) return;
    location.hash = "teach";
    await teachMore([{ name: opened, files }]);
  };
}

// None of these

function drawThreshold() {
  const on = typeof model.threshold === "number";
  $("none-slider").value = on ? model.threshold : 0;
  tellThreshold();
}

/** Say what the slider's place does, as far as lessons tell it. */
function tellThreshold() {
  const value = Number($("none-slider").value);
  const level = model.levels.find(({ threshold }) => threshold >= value);
  const words = value === 0 ? "Off: every picture gets a class." : `Below ${value.toFixed(2)} it says “none of these”.`;
  const most = model.levels.length ? Math.min(...model.levels.map(({ accepted }) => accepted)) : 0;
  const known = level ? ` About ${level.accepted.toFixed(0)} % of pictures of its classes get a class` : ` Fewer than ${most.toFixed(0)} % of pictures of its classes get a class`;
  const strange = typeof level?.rejected === "number" ? `, and ${level.rejected.toFixed(0)} % of other pictures get none.` : ".";
  $("none-words").textContent = words + (value > 0 && model.levels.length ? known + strange : "");
  $("none-slider").setAttribute("aria-valuetext", words);
  $("none-save").disabled = value === Math.round(100 * (model.threshold ?? 0)) / 100;
}

// How well it does

function table(element, names, rows, cell) {
  const head = make("tr", {}, ...["", ...names].map((name) => make("th", { scope: "col", title: name }, name)));
  const body = rows.map(({ name, values }) => {
    return make("tr", {}, make("th", { scope: "row", title: name }, name), ...values.map(cell));
  });
  element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

function heated(text, share) {
  const cell = make("td", {}, text);
  cell.style.setProperty("--heat", (share ** 1.5).toFixed(3));
  return cell;
}

/** Accuracy over time, only where every cell of it was measured. */
function drawMatrix() {
  const rows = model.accuracy_matrix ?? [];
  const whole = rows.length > 1 && rows.every((row, at) => row.slice(0, at + 1).every((value) => typeof value === "number"));
  $("matrix-part").hidden = !whole;
  if (!whole) return;
  const names = model.tasks.map((task) => task.name);
  const told = (value) => (typeof value === "number" ? heated(value.toFixed(0), (value / 100) ** 2) : make("td", { class: "blank" }));
  table($("matrix"), names, rows.map((values, at) => ({ name: names[at], values })), told);
}

/** What each class was taken for, by pictures that were left out while learning, where the model tells it. */
function drawHeldOut() {
  const found = model.accuracy?.confusion ?? {};
  const names = model.classes.filter((name) => name in found);
  const columns = [...names, ...new Set(Object.values(found).flatMap(Object.keys).filter((name) => !names.includes(name)))];
  const counts = names.map((name) => columns.map((column) => found[name][column] ?? 0));
  drawConfusion(names, columns, counts, "Pictures left out while learning.");
}

/** The places of the rows to show: all, or of too many those with most mistakes. */
function worst(mistakes) {
  const all = mistakes.map((_, at) => at);
  if (all.length <= MOST_ROWS) return all;
  return all.sort((one, other) => mistakes[other] - mistakes[one] || one - other).slice(0, MOST_ROWS).sort((one, other) => one - other);
}

/** Show what pictures of each class (rows) were answered with (columns, first the same classes), and how many were right. */
function drawConfusion(names, columns, counts, words) {
  const total = (row) => row.reduce((sum, value) => sum + value, 0);
  const [sums, right] = [counts.map(total), counts.map((row, at) => row[at])];
  const all = total(sums);
  $("confusion-part").hidden = all === 0;
  if (!all) return;
  const legend = "Rows: what the pictures show. Columns: what it answered.";
  const shown = worst(sums.map((sum, at) => sum - right[at]));
  const few = shown.length < names.length ? ` Shown are the ${shown.length} of ${names.length} classes with most mistakes.` : "";
  $("confusion-words").textContent = `${words} ${rightOf(total(right), all)}. ${legend}${few}`;
  const used = columns.map((_, at) => at).filter((at) => !few || shown.some((row) => row === at || counts[row][at]));
  const rows = shown.map((at) => ({ name: names[at], values: used.map((column) => ({ value: counts[at][column], share: counts[at][column] / sums[at] })) }));
  const told = ({ value, share }) => (value ? heated(value.toLocaleString(), share) : make("td", { class: "blank" }));
  table($("confusion"), used.map((at) => columns[at]), rows, told);
  const each = shown.map((at) => make("li", {}, make("strong", {}, names[at]), ` ${sums[at] ? rightOf(right[at], sums[at]) : "not measured"}`));
  $("by-class").replaceChildren(...each);
}

/** Ask about pictures whose classes are known, and count the answers. The server sees ordinary questions. */
async function test(found) {
  const pictures = found.filter(({ path }) => isPicture(path)).sort((one, other) => order(one.path, other.path));
  const labels = classesOf(pictures.map(({ path }) => path));
  const strange = labels.find((label) => !known(label));
  $("test-said").textContent = "";
  if (!pictures.length) return void ($("test-said").textContent = "No pictures were found in that folder.");
  if (strange !== undefined) {
    return void ($("test-said").textContent = strange ? `It does not know “${strange}”.` : "Choose a folder that holds one folder for each class.");
  }
  const names = [...new Set(labels)];
  const counts = names.map(() => new Array(names.length + 2).fill(0)); // then other classes, and none of these
  let done = 0;
  const unread = [];
  const queue = [...pictures.entries()];
  const work = async () => {
    for (let next = queue.shift(); next; next = queue.shift()) {
      const [at, { file }] = next;
      const form = new FormData();
      form.append("images", file, file.name);
      try {
        const { label } = (await call("POST", "predict?top_k=1", form)).answers[0];
        const column = label === null ? names.length + 1 : names.indexOf(label);
        counts[names.indexOf(labels[at])][column < 0 ? names.length : column]++;
      } catch (error) {
        if (!UNREADABLE.includes(error.status)) throw error;
        unread.push(file.name); // and the others are still asked about
      }
      $("test-said").textContent = `${++done} of ${count(pictures.length, "picture")}`;
    }
  };
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  } catch (error) {
    return void ($("test-said").textContent = error.message);
  }
  const others = [["another class", names.length], ["none of these", names.length + 1]];
  const used = others.filter(([, column]) => counts.some((row) => row[column]));
  const shown = counts.map((row) => [...row.slice(0, names.length), ...used.map(([, column]) => row[column])]);
  drawConfusion(names, [...names, ...used.map(([name]) => name)], shown, "Your pictures.");
  $("test-said").textContent = unread.length ? `${count(unread.length, "picture")} could not be read: ${some(unread.sort(order))}.` : "";
  say($("confusion-words").textContent);
}

// Undo

async function drawVersions() {
  try {
    const { versions } = await call("GET", "versions");
    const rows = versions.toReversed().map((version) => {
      const why = version.classes.length || version.why !== "saved" ? version.why : "new, nothing learned yet";
      const words = `${why[0].toUpperCase()}${why.slice(1)}`;
      const about = `Version ${version.number} · ${version.saved ? `${moment(version.saved)} · ` : ""}${count(version.classes.length, "class", "classes")}`;
      const back = button("quiet", `Go back to version ${version.number}`, "Go back");
      back.onclick = () => goBack(version.number, words);
      const end = version.current ? make("span", { class: "count" }, "now") : back;
      return make("li", {}, make("div", {}, make("strong", {}, words), paragraph("task-facts", about)), end);
    });
    $("versions").replaceChildren(...rows);
    $("versions-part").hidden = versions.length < 2;
    $("undo").textContent = `Undo: ${versions.at(-1).why}`;
  } catch {
    $("versions-part").hidden = true; // the notice above says what is wrong with the server
  }
}

async function goBack(number, words) {
  const text = "What was learned since is set aside; it stays among the versions, so this can be undone too.";
  const { yes } = await confirmed(`Go back to “${words}”?`, text, "Go back");
  if (yes) await change(() => call("POST", "rollback", { number }), "It is as it was.");
}

// Drift

/** Show how often it was unsure, by day, or by hour where there is but one day. */
async function drawDrift() {
  try {
    const { hours } = await call("GET", "answers");
    const days = new Map();
    const several = hours.length > 0 && hours.at(-1).start - hours[0].start >= 24 * 3600;
    for (const { start, answers, unsure } of hours) {
      const date = new Date(start * 1000);
      const name = several
        ? date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })
        : date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
      const day = days.get(name) ?? { answers: 0, unsure: 0 };
      days.set(name, { answers: day.answers + answers, unsure: day.unsure + unsure });
    }
    const rows = [...days].map(([name, { answers, unsure }]) => {
      const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("span"));
      bar.firstChild.style.width = `${(100 * unsure) / answers}%`;
      const words = `${unsure.toLocaleString()} of ${answers.toLocaleString()}`;
      return make("li", {}, make("span", { class: "bar-name" }, name), bar, make("span", { class: "bar-value" }, words));
    });
    $("drift").replaceChildren(...rows);
    $("drift-part").hidden = rows.length === 0;
  } catch {
    $("drift-part").hidden = true;
  }
}

export function wireModel() {
  $("search").oninput = drawTasks;
  $("none-slider").oninput = tellThreshold;
  $("none-save").onclick = () => {
    const value = Number($("none-slider").value);
    change(() => call("POST", "threshold", { threshold: value || null }), "Saved.");
  };
  $("test-folder").onchange = async ({ target }) => {
    await test(chosen(target));
    target.value = "";
  };
  $("undo").onclick = () => change(() => call("POST", "rollback", {}), "Undone.");
  wireClass();
}
