// The page of `dualprompt serve`: plain DOM, no dependencies. This file begins it, and shows one of its parts.

import { $, say } from "./base.js";
import { takePictures, wireClassify } from "./classify.js";
import { loadModel, model, wireModel } from "./model.js";
import { dropped } from "./pictures.js";
import { drawReview, wireReview } from "./review.js";
import { complain, takeLesson, wireTeach } from "./teach.js";

const PARTS = ["classify", "teach", "review", "model"];

const shown = () => PARTS.find((part) => !$(part).hidden);

function show(part) {
  for (const name of PARTS) {
    const chosen = name === part;
    $(name).hidden = !chosen;
    $(`tab-${name}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${name}`).tabIndex = chosen ? 0 : -1;
  }
  document.title = `${$(`tab-${part}`).firstChild.textContent.trim()} · dualprompt`;
  if (part === "model") loadModel();
  if (part === "review") drawReview();
}

function wireTabs() {
  for (const part of PARTS) {
    const tab = $(`tab-${part}`);
    const choose = (name) => {
      show(name);
      history.replaceState(null, "", `#${name}`); // not on loading, or the first Tab would pass the tabs
    };
    tab.onclick = () => choose(part);
    tab.onkeydown = (event) => {
      const open = PARTS.filter((name) => !$(`tab-${name}`).hidden);
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const edge = { Home: open[0], End: open.at(-1) }[event.key];
      if (step === undefined && edge === undefined) return;
      event.preventDefault();
      const next = edge ?? open.at((open.indexOf(part) + step) % open.length);
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

function unreadable(error) {
  if (shown() === "teach") complain(`Those files could not be read (${error.message}).`);
  else say("Those files could not be read.");
}

/** Wherever files are dropped or pasted, they go to the part that is shown. */
function wireDrops() {
  const take = (found) => (shown() === "teach" ? takeLesson(found) : takePictures(found.map(({ file }) => file)));
  const closed = { classify: () => false, teach: () => $("teach-form").hidden, review: () => true, model: () => true };
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
wireReview();
wireModel();
await loadModel();
if (model && !model.classes.length && !location.hash) show("teach"); // there is nothing else to do with a new model
