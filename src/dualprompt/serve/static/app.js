// The page of `dualprompt serve`: plain DOM, no dependencies. Whatever comes from the server or from a file name is
// set as text, never as HTML; pictures are drawn on canvases, so the page needs no more than `default-src 'self'`.

const $ = (id) => document.getElementById(id);
const PARTS = ["classify", "teach", "model"];
const PICTURE = /\.(jpe?g|png|webp|gif|bmp|tiff?|ppm)$/i;
const AT_ONCE = 4; // pictures asked about at the same time; the server batches them
const TOP = 5;
const FEW = 5; // fewer pictures of a class than this, and none is held out to see how well it was learned
const POLL = 600; // milliseconds between two looks at a job

let model = null;

// Small helpers

/** Make an element: properties by name, `class`, `aria-*` and `data-*` as attributes, then children (text or nodes). */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const span = (kind, ...children) => make("span", { class: kind }, ...children);
const paragraph = (kind, ...children) => make("p", { class: kind }, ...children);

/** Make a button whose name for a screen reader says more than what is on it. */
function button(kind, name, ...children) {
  return make("button", { type: "button", class: kind, "aria-label": name }, ...children);
}

function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(space, "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

/** Tell a screen reader. */
function say(text) {
  $("live").textContent = "";
  setTimeout(() => ($("live").textContent = text), 50); // a change, even where the words are the same
}

const count = (number, one, many = `${one}s`) => `${number.toLocaleString()} ${number === 1 ? one : many}`;

function percent(fraction) {
  const value = 100 * fraction;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  if (value < 100 && value > 99.9) return "> 99.9 %";
  return `${value.toFixed(value === 100 || value === 0 ? 0 : 1)} %`;
}

function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < 3; unit++) bytes /= 1000;
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

function duration(milliseconds) {
  const seconds = Math.round(milliseconds / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The server's one-line errors begin small and end without a stop. */
function sentence(text) {
  const begun = (text ?? "").replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()); // but not a file's name
  return begun.replace(/[^.!?…]$/, "$&.");
}

const list = (words) => new Intl.ListFormat("en").format(words);

// Talking to the server

class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const noToken = () => new Refusal("This needs the server’s access token.", 401);

/** Ask the server; return its JSON. A refusal carries the server's own words, or friendly ones where it has none. */
async function call(method, path, body = null, onSent = null) {
  for (;;) {
    if (method !== "GET" && !path.startsWith("predict")) await needToken();
    const token = sessionStorage.getItem("token");
    const reply = await send(method, path, body, token, onSent);
    if (reply.status >= 200 && reply.status < 300) return reply.json;
    if (reply.status !== 401) throw new Refusal(sentence(reply.json?.error) || unexplained(reply.status), reply.status);
    const renewed = sessionStorage.getItem("token") !== token; // another request has asked meanwhile
    if (!renewed && !(await askToken(token !== null))) throw noToken();
  }
}

/** Whatever changes the model needs a token: ask for it, if there is none, before anything is sent in vain. */
async function needToken() {
  if (sessionStorage.getItem("token") === null && !(await askToken(false))) throw noToken();
}

/** One request. XMLHttpRequest and not fetch, for it tells how much of an upload is sent. */
function send(method, path, body, token, onSent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    if (token) request.setRequestHeader("Authorization", `Bearer ${token}`);
    if (onSent) request.upload.onprogress = (event) => onSent(event.loaded / event.total);
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
    request.send(body);
  });
}

function unexplained(status) {
  if (status === 413) return "That is more than the server takes at once.";
  if (status === 429 || status === 503) return "The server is busy. Please try again in a moment.";
  return `The server could not do that (status ${status}).`;
}

let asking = null;

/** Ask for the token; however many requests wait for it, there is one dialog. Return whether there is a new one. */
function askToken(wrong) {
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

// Parts of the page

const shown = () => PARTS.find((part) => !$(part).hidden);

function show(part) {
  for (const name of PARTS) {
    const chosen = name === part;
    $(name).hidden = !chosen;
    $(`tab-${name}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${name}`).tabIndex = chosen ? 0 : -1;
  }
  document.title = `${$(`tab-${part}`).textContent} · dualprompt`;
  if (part === "model") loadModel();
}

function wireTabs() {
  for (const [index, part] of PARTS.entries()) {
    const tab = $(`tab-${part}`);
    const choose = (name) => {
      show(name);
      history.replaceState(null, "", `#${name}`); // not on loading, or the first Tab would pass the tabs
    };
    tab.onclick = () => choose(part);
    tab.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const edge = { Home: PARTS[0], End: PARTS.at(-1) }[event.key];
      if (step === undefined && edge === undefined) return;
      event.preventDefault();
      const next = edge ?? PARTS.at((index + step) % PARTS.length);
      choose(next);
      $(`tab-${next}`).focus();
    };
  }
  const follow = () => show(PARTS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "classify");
  addEventListener("hashchange", () => {
    if (takeToken()) return loadModel(); // the printed address, put into a tab that was open; it shows what it showed
    follow();
    scrollTo(0, 0);
    $(`tab-${shown()}`).focus();
  });
  follow();
}

// Pictures

let painting = Promise.resolve();

/** Draw a picture into a square canvas, cut to fill it; one after another, so that big photos do not pile up. */
function paint(canvas, file) {
  painting = painting.then(async () => {
    if (!canvas.isConnected) return;
    try {
      const bitmap = await createImageBitmap(file);
      const side = Math.min(bitmap.width, bitmap.height);
      const [left, top] = [(bitmap.width - side) / 2, (bitmap.height - side) / 2];
      canvas.width = canvas.height = Math.round(canvas.clientWidth * devicePixelRatio) || 96;
      const context = canvas.getContext("2d");
      context.imageSmoothingQuality = "high";
      context.drawImage(bitmap, left, top, side, side, 0, 0, canvas.width, canvas.height);
      bitmap.close();
    } catch {
      canvas.replaceWith(span(`${canvas.className} unseen`, icon("picture"))); // a kind the browser cannot show
    }
  });
}

/** Return the files of a drop with their paths, going down into folders. */
async function dropped(transfer) {
  // Entries are only to be had while the event lasts: take all before the first await.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, path: file.name }));
  const found = [];
  const visit = async (entry) => {
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      found.push({ file, path: entry.fullPath.replace(/^\//, "") });
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) return;
      for (const inner of some) await visit(inner);
    }
  };
  for (const entry of entries) await visit(entry);
  return found;
}

function unreadable(error) {
  if (shown() === "teach") complain(`Those files could not be read (${error.message}).`);
  else say("Those files could not be read.");
}

/** Wherever files are dropped or pasted, they go to the part that is shown. */
function wireDrops() {
  const take = (found) => (shown() === "teach" ? takeLesson(found) : takePictures(found.map(({ file }) => file)));
  const closed = { classify: () => false, teach: () => $("teach-form").hidden, model: () => true };
  const busy = () => closed[shown()]() || document.querySelector("dialog[open]") !== null;
  const light = (on) => document.body.classList.toggle("dropping", on);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    event.dataTransfer.dropEffect = busy() ? "none" : "copy";
    light(!busy());
  });
  addEventListener("dragleave", (event) => event.relatedTarget === null && light(false));
  addEventListener("drop", async (event) => {
    event.preventDefault();
    light(false);
    if (busy()) return;
    try {
      await take(await dropped(event.dataTransfer));
    } catch (error) {
      unreadable(error);
    }
  });
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || busy()) return;
    event.preventDefault();
    take(files.map((file) => ({ file, path: file.name })));
  });
}

// Classify

/** Ask about some pictures, a few at a time; every picture has its own card, and its own error if it comes to that. */
async function takePictures(files) {
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
    : make("h3", {}, answer.label, " ", span("sure", percent(answer.probability)));
  const nearest = best ? ` The nearest would be ${best.label}.` : "";
  const words = none ? [paragraph("why", `Not near and certain enough to name a class.${nearest}`)] : [];
  if (answer.task !== null) {
    const similarity = span("number", `similarity ${answer.similarity.toFixed(2)}`);
    const about = none ? "Nearest task: " : "Task: ";
    const how = ` · ${closeness(answer.similarity)}, `;
    words.push(paragraph("why", about, make("strong", {}, answer.task), how, similarity));
  }
  fill(card, file, none ? "none" : "known", heading, words, bars(answer.top));
  const named = none ? "none of these" : `${answer.label}, ${percent(answer.probability)}`;
  return `${fileName(file)}: ${named}.`;
}

/** A cosine in words. */
function closeness(similarity) {
  if (similarity >= 0.7) return "very like its pictures";
  if (similarity >= 0.5) return "like its pictures";
  if (similarity >= 0.3) return "somewhat like its pictures";
  return "little like its pictures";
}

function bars(top) {
  const rows = top.map(({ label, probability }) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("span"));
    bar.firstChild.style.width = `${100 * probability}%`;
    return make("li", {}, span("bar-name", label), bar, span("bar-value", percent(probability)));
  });
  return make("ol", { class: "bars", "aria-label": `The ${rows.length} most probable classes` }, ...rows);
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

function wireClassify() {
  $("classify-files").onchange = (event) => {
    takePictures([...event.target.files]);
    event.target.value = ""; // the same file may be chosen again
  };
  $("results-clear").onclick = () => {
    $("results").replaceChildren();
    countAnswers();
    $("classify-files").focus();
    say("Answers cleared.");
  };
}

// Teach

const lesson = { classes: [], zip: null };

/** Add files with paths to the lesson: a picture's folder names its class; pictures without one wait for a name. */
async function takeLesson(found, named = null) {
  complain(null);
  const zips = found.filter(({ file }) => /\.zip$/i.test(file.name));
  if (zips.length) {
    if (found.length > 1 || lesson.classes.length || lesson.zip) {
      return complain("A zip is taught by itself: one zip, and no other classes beside it. Remove the others first.");
    }
    const file = zips[0].file;
    lesson.zip = { file, classes: await classesInZip(file) };
  } else {
    const pictures = found.filter(({ path }) => isPicture(path)).sort((one, other) => order(one.path, other.path));
    if (pictures.length && lesson.zip) {
      return complain("A zip is taught by itself. Remove the zip first, or put these pictures into it.");
    }
    const names = classesOf(pictures.map(({ path }) => path));
    pictures.forEach(({ file }, index) => classNamed(named ?? names[index]).files.push(file));
    const left = found.length - pictures.length;
    if (!found.length) complain("That folder is empty.");
    else if (!pictures.length) complain("No pictures were found among these files.");
    else if (left) complain(`${count(left, "file is", "files are")} left out: not pictures.`, "mild");
  }
  drawLesson();
  const unnamed = $("lesson-list").querySelector("input:placeholder-shown");
  if (unnamed) unnamed.focus();
  say($("lesson-count").textContent);
}

const order = new Intl.Collator("en", { numeric: true }).compare; // browsers list folders in no order

const isPicture = (path) => PICTURE.test(path) && !/(^|\/)(\.|__MACOSX\/)/.test(path);

/** Name the class of each path as the server does: its first folder, but for one that only holds all the others. */
function classesOf(paths) {
  let parts = paths.map((path) => path.split("/"));
  const one = new Set(parts.map(([first]) => first)).size === 1;
  if (one && parts.every((folders) => folders.length > 2)) parts = parts.map((folders) => folders.slice(1));
  return parts.map((folders) => (folders.length > 1 ? folders[0] : ""));
}

function classNamed(name) {
  let found = lesson.classes.find((one) => one.name === name);
  if (!found) lesson.classes.push((found = { name, files: [] }));
  return found;
}

/** Count the pictures of each class in a zip, from its central directory alone; null if that cannot be read. */
async function classesInZip(file) {
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
  const classes = new Map();
  for (const found of classesOf(paths.sort(order))) classes.set(found, (classes.get(found) ?? 0) + 1);
  return classes.size ? classes : null;
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

const known = (name) => model?.classes.includes(name) ?? false;

function remark(name, pictures) {
  if (known(name)) return "It knows this class already";
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
  drawLesson();
  if (!$("teach-form").hidden) $("teach-folder").focus();
}

/** Show words above the list of classes; null takes them away. `again` offers to teach known classes once more. */
function complain(text, kind = "bad", again = false) {
  $("teach-said").hidden = text === null;
  $("teach-said").className = `notice ${kind}`;
  $("teach-said-text").textContent = text ?? "";
  $("teach-again-offer").hidden = !again;
  if (!again) $("teach-again").checked = false;
}

/** What keeps the lesson from being sent, in words; null if nothing does. */
function objection() {
  const names = lessonNames();
  if (!lesson.zip && names.some((name) => name === "")) return "One class has no name yet.";
  const odd = names.find((name) => /[/\\]/.test(name) || /^\.+$/.test(name));
  if (odd) return `“${odd}” cannot be the name of a class: leave out slashes, and more than dots, please.`;
  const epochs = $("task-epochs");
  if (!epochs.validity.valid) return "Epochs: a whole number from 1 to 500, or nothing.";
  const name = $("task-name").value.trim();
  if (model?.tasks.some((task) => task.name === name)) return `A task is called “${name}” already. Choose another name.`;
  return null;
}

async function startTeaching(event) {
  event.preventDefault();
  const wrong = objection();
  if (wrong) return complain(wrong);
  const again = $("teach-again").checked;
  const old = lessonNames().filter(known);
  if (old.length && !again) {
    const names = list(old.map((name) => `“${name}”`));
    return complain(`It knows ${names} already, and learns nothing twice unless you say so.`, "mild", true);
  }
  const form = new FormData();
  const [name, epochs] = [$("task-name").value.trim(), $("task-epochs").value];
  if (name) form.append("name", name);
  if (epochs) form.append("epochs", epochs);
  if (again) form.append("again", "true");
  if (lesson.zip) form.append("archive", lesson.zip.file, lesson.zip.file.name);
  for (const one of lesson.classes) {
    // Numbered, for pictures of one class may come from several folders and bear the same name.
    one.files.forEach((file, index) => form.append("images", file, `${one.name}/${index + 1}-${file.name}`));
  }
  const begun = Date.now();
  try {
    await needToken();
    if (!model) await loadModel(); // a server that shows nothing without its token refuses a wrong one here already
    const sent = (part) => showJob("Sending the pictures", part, percent(part), begun);
    sent(0);
    $("job-title").focus();
    const job = await call("POST", "tasks", form, sent);
    sessionStorage.setItem("job", JSON.stringify({ id: job.id, begun }));
    await watch(job.id, begun);
  } catch (error) {
    endJob();
    complain(error.message, "bad", error.status === 409 && /know[ns]/.test(error.message) && !again);
    $("teach-start").focus();
  }
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

/** Follow a job to its end. The server may be restarted meanwhile: keep asking for a while. */
async function watch(id, begun) {
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
    if (job?.state === "done") return taught(begun, job.task);
    if (job) {
      showJob(job.state === "queued" ? "Waiting for its turn" : "Learning", job.progress, told(job), begun);
      const now = Math.floor(4 * job.progress);
      if (now > quarter) say(`${25 * (quarter = now)} percent learned.`);
    }
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

function told({ message, loss }) {
  return [message, typeof loss === "number" ? `loss ${loss.toFixed(2)}` : ""].filter(Boolean).join(", ");
}

/** Why a job failed. One may still be refused when its turn comes, for the job before it has taught the same class. */
function failure({ error }) {
  if (error === "cancelled") return new Refusal("Given up. The model is as it was.");
  return new Refusal(sentence(error) || "Learning failed.", /already/.test(error ?? "") ? 409 : 0);
}

async function taught(begun, number) {
  sessionStorage.removeItem("job");
  await loadModel();
  const task = model?.tasks.find(({ id }) => id === number);
  const right = typeof task?.accuracy === "number" ? ` ${task.accuracy.toFixed(1)} % right on held-out pictures.` : "";
  const what = task ? `${task.name}: ${list(task.classes)}.` : "The new classes are known now.";
  showJob("Learned", 1, "", begun);
  $("job-running").hidden = true;
  $("job-links").hidden = false;
  $("job-end").textContent = `${what} Done in ${duration(Date.now() - begun)}.${right}`;
  clearLesson();
  say(`Learned. ${$("job-end").textContent}`);
  if (shown() === "teach") $("job-title").focus();
}

function wireTeach() {
  const chosen = (input) => [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));
  for (const id of ["teach-folder", "teach-zip"]) {
    $(id).onchange = async ({ target }) => {
      await takeLesson(chosen(target));
      target.value = "";
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
    watch(left.id, left.begun).catch((error) => {
      endJob();
      complain(error.message);
    });
  }
}

// Model

/** Read what the model knows, and show it. */
async function loadModel() {
  try {
    model = await call("GET", "model");
    $("offline").hidden = true;
  } catch (error) {
    $("offline-text").textContent = error.message;
    $("offline").hidden = false;
    return;
  }
  const { tasks, classes } = model;
  const knows = `${count(classes.length, "class", "classes")} in ${count(tasks.length, "task")}`;
  $("knows").textContent = tasks.length ? knows : "nothing learned yet";
  $("version").textContent = `dualprompt ${model.version} · model ${model.model_version}`;
  $("token-forget").hidden = !sessionStorage.getItem("token");
  $("classify-empty").hidden = classes.length > 0;
  $("model-empty").hidden = tasks.length > 0;
  $("tasks-part").hidden = tasks.length === 0;
  drawFacts();
  $("tasks").replaceChildren(...tasks.map(taskCard));
  drawMatrix();
}

/** A backbone or method may be told by its name or with its details; a file stands for itself without its folders. */
const called = (thing) => (thing.name ?? thing).split("/").at(-1);

function drawFacts() {
  const facts = [
    ["Classes", model.classes.length.toLocaleString()],
    ["Tasks", model.tasks.length.toLocaleString()],
    ["Size", size(model.bytes)],
    ["Backbone", called(model.backbone)],
    ["Method", called(model.method)],
    ["“None of these”", typeof model.threshold === "number" ? `below ${model.threshold.toFixed(2)}` : "never said"],
  ];
  const rows = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))));
  $("facts").replaceChildren(...rows);
}

function taskCard(task) {
  const forget = button("quiet", `Forget the task ${task.name}`, icon("bin"), "Forget");
  forget.onclick = () =>
    forgetIt(
      `Forget the task “${task.name}”?`,
      `It will never again answer ${list(task.classes)}. All other answers stay as they are. This cannot be undone.`,
      `tasks/${encodeURIComponent(task.id)}`,
    );
  const chips = task.classes.map((name) => {
    const cross = button("", `Forget the class ${name}`, icon("cross"));
    const text = `It will never again answer ${name}. This cannot be undone.`;
    cross.onclick = () => forgetIt(`Forget the class “${name}”?`, text, `classes/${encodeURIComponent(name)}`);
    return make("li", {}, make("span", {}, name), cross);
  });
  const from = ` from ${count(task.images, "picture")} · ${size(task.bytes)}`;
  const card = make(
    "li",
    { class: "task" },
    make("div", { class: "row-head" }, make("h3", {}, task.name), forget),
    paragraph("task-facts", "Learned ", make("time", { dateTime: task.learned }, moment(task.learned)), from),
  );
  if (typeof task.accuracy === "number") {
    const right = make("strong", {}, `${task.accuracy.toFixed(1)} %`);
    card.append(paragraph("accuracy", right, " right on held-out pictures"));
  }
  card.append(make("ul", { class: "chips", "aria-label": `Classes of ${task.name}` }, ...chips));
  return card;
}

function moment(text) {
  const date = new Date(text.replace(/([+-]\d\d)(\d\d)$/, "$1:$2")); // not every browser reads +0000
  return isNaN(date) ? text : date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

function drawMatrix() {
  const rows = model.accuracy_matrix ?? [];
  $("matrix-part").hidden = rows.length < 1;
  const named = rows.length === model.tasks.length;
  const names = rows.map((_, index) => (named ? model.tasks[index].name : `Task ${index + 1}`));
  const head = make("tr", {}, ...["after", ...names].map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map((row, index) => {
    const cells = names.map((_, column) => {
      const value = row[column];
      if (typeof value !== "number") return make("td", { class: "blank" });
      const cell = make("td", {}, value.toFixed(0));
      cell.style.setProperty("--heat", ((value / 100) ** 3).toFixed(3)); // steep, for 90 and 99 are far apart
      return cell;
    });
    return make("tr", {}, make("th", { scope: "row" }, names[index]), ...cells);
  });
  $("matrix").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

async function forgetIt(title, text, path) {
  if (!(await confirmed(title, text))) return;
  $("model-said").hidden = true;
  try {
    await call("DELETE", path);
    say("Forgotten.");
  } catch (error) {
    $("model-said-text").textContent = error.message;
    $("model-said").hidden = false;
  }
  await loadModel();
  $("model-title").focus();
}

function confirmed(title, text) {
  const dialog = $("confirm");
  $("confirm-title").textContent = title;
  $("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => (dialog.onclose = () => resolve(dialog.returnValue === "yes")));
}

// Begin

/**
 * The server prints the page's address with its token, which is not sent anywhere and need not stay in sight. Return
 * whether there was one.
 */
function takeToken() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token === null) return false;
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
  if ($("token").open) {
    $("token-value").value = token; // it is what the dialog asks for
    $("token").close("yes");
  }
  return true;
}

$("token-no").onclick = () => $("token").close("no");
$("token-forget").onclick = () => {
  sessionStorage.removeItem("token");
  $("token-forget").hidden = true;
  say("Token forgotten.");
};
$("offline-retry").onclick = loadModel;
takeToken();
$("token-forget").hidden = sessionStorage.getItem("token") === null;
wireTabs();
wireDrops();
wireClassify();
wireTeach();
loadModel();
