// Teach: pictures of new classes, or more of known ones, are looked at first and then learned, as a job of the server.

import { $, Refusal, button, call, count, duration, icon, list, make, needToken, percent, say, sentence, size, some, span } from "./base.js";
import { known, loadModel, measured, model } from "./model.js";
import { chosen, classesOf, innerClassesOf, isPicture, order, paint, tooHigh, topFolder } from "./pictures.js";

const FEW = 5; // fewer pictures of a class than this are too few to see how well it was learned
const POLL = 600; // milliseconds between two looks at a job

const lesson = { classes: [], zip: null };

/** Add files with paths to the lesson: a picture's folder names its class; pictures without one wait for a name. */
export async function takeLesson(found, named = null) {
  complain(null);
  endAsking();
  let asked = false;
  const zips = found.filter(({ file }) => /\.zip$/i.test(file.name));
  if (zips.length) {
    if (found.length > 1 || lesson.classes.length || lesson.zip) {
      return complain("A zip is taught by itself: one zip, and no other classes beside it. Remove the others first.");
    }
    const file = zips[0].file;
    const paths = await picturesInZip(file);
    const nested = paths && tooHigh(paths);
    asked = nested !== null;
    if (asked && !(await askLevel(nested, null))) return;
    lesson.zip = { file, classes: paths && countedBy(classesOf(paths)), nested: nested !== null };
    suggestName(file.name.replace(/\.zip$/i, ""));
  } else {
    const pictures = found.filter(({ path }) => isPicture(path)).sort((one, other) => order(one.path, other.path));
    if (pictures.length && lesson.zip) {
      return complain("A zip is taught by itself. Remove the zip first, or put these pictures into it.");
    }
    const paths = pictures.map(({ path }) => path);
    let names = classesOf(paths);
    const nested = named === null ? tooHigh(paths) : null;
    asked = nested !== null;
    if (asked) {
      const inner = innerClassesOf(paths);
      const answer = await askLevel(nested, inner);
      if (!answer) return;
      if (answer === "inner") names = inner;
    }
    suggestName(topFolder(paths));
    pictures.forEach(({ file }, index) => classNamed(named ?? names[index]).files.push(file));
    const left = found.filter(({ path }) => !isPicture(path)).map(({ path }) => path.split("/").at(-1)).sort(order);
    if (!found.length) complain("That folder is empty.");
    else if (!pictures.length) complain("No pictures were found among these files.");
    else if (left.length) complain(`${count(left.length, "file is", "files are")} left out, being no pictures: ${some(left)}.`, "mild");
  }
  drawLesson();
  const unnamed = $("lesson-list").querySelector("input:placeholder-shown");
  (unnamed ?? (asked ? $("task-name") : null))?.focus();
  say($("lesson-count").textContent);
}

let answerLevel = null;

/** Whoever chooses other pictures has not answered. */
function endAsking() {
  $("level-part").hidden = true;
  answerLevel?.(null);
  answerLevel = null;
}

/** Ask which folders are the classes; return "inner" or "outer", or null if other pictures are chosen instead. */
function askLevel(nested, inner) {
  const [outer, [first, own]] = [[...nested.keys()], [...nested][0]];
  const holds = `“${first}” holds folders of its own (${some([...own])})`;
  const else_ = inner ? "" : " If not, choose a zip of one of them.";
  $("level-text").textContent = `${holds}. Which are the classes?${else_}`;
  $("level-inner").hidden = !inner;
  $("level-inner").textContent = inner ? some([...new Set(inner)].sort(order)) : "";
  $("level-outer").textContent = some(outer.sort(order));
  $("level-part").hidden = false;
  $("level-text").focus();
  return new Promise((resolve) => {
    answerLevel = resolve;
    for (const answer of ["inner", "outer"]) {
      $(`level-${answer}`).onclick = () => {
        answerLevel = null;
        $("level-part").hidden = true;
        resolve(answer);
      };
    }
  });
}

/** A folder's name is a good name for the lesson, unless people have given one or another lesson has it. */
function suggestName(name) {
  const free = name && !$("task-name").value && !model?.tasks.some((task) => task.name === name);
  if (free) $("task-name").value = name.slice(0, 100);
}

/** Begin a lesson with pictures of one class, beside what was chosen already. */
export function lessonOf(name, files) {
  classNamed(name).files.push(...files);
  drawLesson();
}

function classNamed(name) {
  let found = lesson.classes.find((one) => one.name === name);
  if (!found) lesson.classes.push((found = { name, files: [] }));
  return found;
}

/** The paths of the pictures in a zip, from its central directory alone; null if that cannot be read. */
async function picturesInZip(file) {
  const tail = new DataView(await file.slice(-65557).arrayBuffer());
  let end = tail.byteLength - 22;
  while (end >= 0 && tail.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0) return null;
  const [length, start] = [tail.getUint32(end + 12, true), tail.getUint32(end + 16, true)];
  if (start === 0xffffffff || length > 64e6) return null;
  const directory = new DataView(await file.slice(start, start + length).arrayBuffer());
  const paths = [];
  for (let at = 0; at + 46 <= directory.byteLength && directory.getUint32(at, true) === 0x02014b50; ) {
    const [name, extra, comment] = [28, 30, 32].map((place) => directory.getUint16(at + place, true));
    if (at + 46 + name > directory.byteLength) return null;
    const path = new TextDecoder().decode(new Uint8Array(directory.buffer, at + 46, name));
    if (isPicture(path)) paths.push(path);
    at += 46 + name + extra + comment;
  }
  return paths.length ? paths.sort(order) : null;
}

function countedBy(names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) ?? 0) + 1);
  return found;
}

/** The names of the classes in the lesson; empty for a zip that could not be listed. */
function lessonNames() {
  return lesson.zip ? [...(lesson.zip.classes?.keys() ?? [])] : lesson.classes.map((one) => one.name);
}

function drawLesson() {
  const rows = lesson.zip ? zipRows() : lesson.classes.map(classRow);
  const pictures = lesson.zip
    ? [...(lesson.zip.classes?.values() ?? [])].reduce((sum, number) => sum + number, 0)
    : lesson.classes.reduce((sum, one) => sum + one.files.length, 0);
  const names = lessonNames().length;
  $("lesson-count").textContent = names ? `${count(names, "class", "classes")}, ${count(pictures, "picture")}` : "";
  $("lesson").hidden = rows.length === 0;
  $("teach-drop").classList.toggle("compact", rows.length > 0);
  $("lesson-list").replaceChildren(...rows);
  showFindings([]); // of other pictures than these
  for (const canvas of $("lesson-list").querySelectorAll("canvas")) paint(canvas, canvas.picture);
}

function classRow(one, index) {
  const id = `class-${index}`;
  const name = make("input", { type: "text", id, value: one.name, maxLength: 100, autocomplete: "off" });
  name.placeholder = "Name this class";
  name.onchange = () => {
    const wanted = name.value.trim();
    const same = lesson.classes.find((other) => other !== one && other.name === wanted);
    if (same) {
      same.files.push(...one.files);
      lesson.classes.splice(index, 1);
      drawLesson();
      say(`Put together as ${wanted}.`);
    } else {
      one.name = wanted;
      note.textContent = remark(wanted, one.files.length);
    }
  };
  const seen = index < 40 ? one.files.slice(0, 4) : []; // thumbnails of hundreds of classes would only keep it busy
  const thumbs = seen.map(() => make("canvas", { class: "mini", "aria-hidden": "true" }));
  thumbs.forEach((canvas, place) => (canvas.picture = seen[place]));
  const note = span("remark", remark(one.name, one.files.length));
  const remove = button("quiet icon-button", `Remove ${one.name || "the unnamed class"}`, icon("cross"));
  remove.onclick = () => {
    lesson.classes.splice(index, 1);
    drawLesson();
    const next = $("lesson-list").querySelectorAll("button")[Math.min(index, lesson.classes.length - 1)];
    (next ?? $("teach-folder")).focus();
    say(`${one.name || "The class"} removed.`);
  };
  const label = make("label", { htmlFor: id, class: "hidden-words" }, `Name of class ${index + 1}`);
  const pictures = span("count", count(one.files.length, "picture"));
  return make("li", {}, span("minis", ...thumbs), span("class-words", label, name, note), pictures, remove);
}

function remark(name, pictures) {
  if (known(name)) return "It knows this class; these are added";
  return pictures < FEW ? "Few pictures; more would help" : "";
}

function zipRows() {
  const { file, classes } = lesson.zip;
  const remove = button("quiet icon-button", `Remove ${file.name}`, icon("cross"));
  remove.onclick = clearLesson;
  const name = span("class-words", make("strong", {}, file.name));
  const head = make("li", {}, span("minis", icon("zip")), name, span("count", size(file.size)), remove);
  const rows = [...(classes ?? [])].map(([label, number]) => {
    const words = span("class-words", label || "in no folder", span("remark", remark(label, number)));
    return make("li", { class: "inside" }, words, span("count", count(number, "picture")));
  });
  return [head, ...rows];
}

function clearLesson() {
  lesson.classes = [];
  lesson.zip = null;
  $("task-name").value = "";
  complain(null);
  endAsking();
  drawLesson();
  if (!$("teach-form").hidden) $("teach-folder").focus();
}

/** Show words above the list of classes; null takes them away. */
export function complain(text, kind = "bad") {
  $("teach-said").hidden = text === null;
  $("teach-said").className = `notice ${kind}`;
  $("teach-said-text").textContent = text ?? "";
}

/** What keeps the lesson from being sent, in words; null if nothing does. */
function objection() {
  const names = lessonNames();
  if (!lesson.zip && names.some((name) => name === "")) return "One class has no name yet.";
  const odd = names.find((name) => /[/\\]/.test(name) || /^\.+$/.test(name));
  if (odd) return `“${odd}” cannot be the name of a class: leave out slashes, and more than dots, please.`;
  const epochs = $("task-epochs");
  if (!epochs.validity.valid) return "Passes over the pictures: a whole number from 1 to 500, or nothing.";
  const name = $("task-name").value.trim();
  if (model?.tasks.some((task) => task.name === name)) return `A lesson is called “${name}” already. Choose another name.`;
  const old = names.filter(known);
  if (lesson.zip && old.length && old.length < names.length) {
    return `It knows ${list(old.map((one) => `“${one}”`))} already. Put new classes and known ones into two zips, please.`;
  }
  return null;
}

/** A form of pictures with their classes. Those from several folders may bear the same name: all but the first get a number. */
function formOf(classes, zip = null) {
  const form = new FormData();
  if (zip) form.append("archive", zip.file, zip.file.name);
  if (zip?.nested) form.append("nested", "true");
  for (const one of classes) {
    const taken = new Set();
    one.files.forEach((file, index) => {
      const name = taken.has(file.name) ? `${index + 1}-${file.name}` : file.name;
      taken.add(name);
      form.append("images", file, `${one.name}/${name}`);
    });
  }
  return form;
}

async function startTeaching(event) {
  event.preventDefault();
  const wrong = objection();
  complain(wrong); // or takes away what was said before
  if (wrong) return;
  const looked = !$("check-part").hidden;
  try {
    await needToken();
    if (!model) await loadModel(); // a server that shows nothing without its token refuses a wrong one here already
    if (!looked && (await hasFindings())) return;
    await teachLesson(looked);
  } catch (error) {
    endJob();
    complain(error.message);
    $("teach-start").focus();
  }
}

/** Have the server look at the pictures first; show what it finds, and return whether there was anything. */
async function hasFindings() {
  const begun = Date.now();
  const job = await sent("check", formOf(lesson.classes, lesson.zip), begun);
  await watch(job.id, begun, "Looking at the pictures");
  const { lines } = await call("GET", `jobs/${encodeURIComponent(job.id)}/findings`);
  endJob();
  showFindings(lines);
  if (lines.length) {
    say(`${count(lines.length, "thing")} to look at before it learns.`);
    $("check-title").focus();
  }
  return lines.length > 0;
}

function showFindings(lines) {
  $("check-part").hidden = lines.length === 0;
  $("check-list").replaceChildren(...lines.map((line) => make("li", {}, sentence(line))));
  $("teach-start").textContent = lines.length ? "Teach it anyway" : "Start teaching";
}

/** Teach what was chosen: known classes get more pictures, new ones are a lesson. Who has seen what cannot be read leaves it out. */
async function teachLesson(looked) {
  const names = lessonNames();
  const all = names.length > 0 && names.every(known);
  const [name, epochs, begun] = [$("task-name").value.trim(), $("task-epochs").value, Date.now()];
  const more = lesson.zip ? [] : lesson.classes.filter((one) => known(one.name));
  const fresh = lesson.zip ? [] : lesson.classes.filter((one) => !known(one.name));
  if (all || more.length) {
    const form = formOf(more, all ? lesson.zip : null);
    if (looked) form.append("skip_bad", "true");
    const job = await sent("more", form, begun);
    await watch(job.id, begun);
    if (all) return taught(begun, null, names);
    lesson.classes = fresh; // what was added is not added again, should the rest be refused
    drawLesson();
  }
  const form = formOf(fresh, lesson.zip);
  if (name) form.append("name", name);
  if (epochs) form.append("epochs", epochs);
  if (looked) form.append("skip_bad", "true");
  const job = await sent("tasks", form, begun);
  sessionStorage.setItem("job", JSON.stringify({ id: job.id, begun }));
  await taught(begun, (await watch(job.id, begun)).task, names);
}

/** Teach more pictures of known classes, from elsewhere on the page; return whether they were learned. */
export async function teachMore(classes) {
  const begun = Date.now();
  try {
    const job = await sent("more", formOf(classes), begun);
    await watch(job.id, begun);
    await taught(begun, null, classes.map((one) => one.name));
    return true;
  } catch (error) {
    endJob();
    complain(error.message);
    return false;
  }
}

/** Learn the pictures of the server's queue that were named. */
export async function teachReviewed() {
  const begun = Date.now();
  location.hash = "teach";
  try {
    const job = await call("POST", "review-lesson");
    showJob("Learning", 0, "", begun);
    await watch(job.id, begun);
    await taught(begun, null, job.classes ?? []);
  } catch (error) {
    endJob();
    complain(error.message);
  }
}

/** Send pictures; return the job that comes of it. */
async function sent(path, form, begun) {
  const progress = (part) => showJob("Sending the pictures", part, percent(part), begun);
  progress(0);
  $("job-title").focus();
  return call("POST", path, form, progress);
}

function showJob(title, part, message, begun) {
  $("teach-form").hidden = true;
  $("job").hidden = false;
  $("job-running").hidden = false;
  if (title.startsWith("Sending")) $("job-cancel").hidden = true; // nothing to give up before the server has it
  $("job-links").hidden = true;
  $("job-end").textContent = "";
  $("job-title").textContent = title;
  $("job-bar").value = part;
  $("job-message").textContent = message;
  const past = Date.now() - begun;
  const left = part > 0.1 && part < 1 && past > 3000 ? `, about ${duration((past * (1 - part)) / part)} left` : "";
  $("job-time").textContent = `${duration(past)}${left}`;
}

function endJob() {
  sessionStorage.removeItem("job");
  $("job").hidden = true;
  $("teach-form").hidden = false;
}

/** Follow a job to its end; return it. The server may be restarted meanwhile: keep asking for a while. */
async function watch(id, begun, doing = "Learning") {
  let quarter = 0;
  $("job-cancel").hidden = false;
  $("job-cancel").onclick = () => call("DELETE", `jobs/${encodeURIComponent(id)}`).catch((error) => say(error.message));
  for (let silent = 0; ; ) {
    let job = null;
    try {
      job = await call("GET", `jobs/${encodeURIComponent(id)}`);
      silent = 0;
    } catch (error) {
      if (error.status === 404) throw new Refusal("The server does not know of this lesson any more.");
      if (error.status || ++silent > 100) throw error;
      $("job-message").textContent = "The server does not answer; trying again…";
    }
    if (job?.state === "failed") throw failure(job);
    if (job?.state === "done") return job;
    if (job) {
      showJob(job.state === "queued" ? "Waiting for its turn" : doing, job.progress, told(job), begun);
      const now = Math.floor(4 * job.progress);
      if (now > quarter) say(`${25 * (quarter = now)} percent learned.`);
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

const PLAIN = [
  [/^(reading|decoding)/, "Reading the pictures"],
  [/^frozen features/, "Looking at the pictures"],
  [/^task /, "Practising"],
  [/^evaluat/, "Seeing how well it does"],
  [/^after task/, ""],
];

/** What is being done, in words that need no explanation. */
function told({ message }) {
  return (PLAIN.find(([pattern]) => pattern.test(message)) ?? [null, message])[1];
}

/** Why a job failed. One may still be refused when its turn comes, for the job before it has taught the same class. */
function failure({ error }) {
  if (error === "cancelled") return new Refusal("Given up. The model is as it was.");
  return new Refusal(sentence(error) || "Learning failed.", /already/.test(error ?? "") ? 409 : 0);
}

async function taught(begun, number, names = []) {
  sessionStorage.removeItem("job");
  await loadModel();
  const task = model?.tasks.find(({ id }) => id === number);
  const right = typeof task?.accuracy === "number" ? ` ${measured(task)}.` : "";
  const added = names.length ? `More pictures of ${some([...new Set(names)])}.` : "It has learned them.";
  const what = task ? `${task.name}: ${some(task.classes)}.` : added;
  showJob("Learned", 1, "", begun);
  $("job-running").hidden = true;
  $("job-links").hidden = false;
  $("job-end").textContent = `${what} Done in ${duration(Date.now() - begun)}.${right}`;
  clearLesson();
  say(`Learned. ${$("job-end").textContent}`);
  if (!$("teach").hidden) $("job-title").focus();
}

export function wireTeach() {
  for (const id of ["teach-folder", "teach-zip"]) {
    $(id).onchange = ({ target }) => {
      const found = chosen(target);
      target.value = ""; // so that the same folder can be chosen again
      return takeLesson(found);
    };
  }
  $("add-files").onchange = async ({ target }) => {
    const name = $("add-name").value.trim();
    await takeLesson(chosen(target), name);
    target.value = "";
    $("add-name").value = "";
    if (name) $("add-name").focus();
  };
  $("add-name").onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // Enter asks for the pictures; it would start the lesson otherwise
    $("add-files").click();
  };
  $("lesson-clear").onclick = clearLesson;
  $("teach-form").onsubmit = startTeaching;
  $("job-next").onclick = () => {
    endJob();
    $("teach-folder").focus();
  };
  const left = JSON.parse(sessionStorage.getItem("job") ?? "null");
  if (left) {
    // The page was loaded anew while a job ran.
    showJob("Learning", 0, "", left.begun);
    watch(left.id, left.begun)
      .then((job) => taught(left.begun, job.task))
      .catch((error) => {
        endJob();
        complain(error.message);
      });
  }
}
