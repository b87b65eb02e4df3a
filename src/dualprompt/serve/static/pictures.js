// Pictures: drawn on canvases, so that the page needs no more than `default-src 'self'`; dropped, pasted, in folders.

import { icon, span } from "./base.js";

let painting = Promise.resolve();

/** Draw a picture into a square canvas, cut to fill it; one after another, so that big photos do not pile up. */
export function paint(canvas, file) {
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

/** Draw what is a picture already, whole, as wide as there is room. */
export function drawWhole(canvas, bitmap) {
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

/** Return the files of a drop with their paths, going down into folders. */
export async function dropped(transfer) {
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

export const order = new Intl.Collator("en", { numeric: true }).compare; // browsers list folders in no order

const PICTURE = /\.(jpe?g|png|webp|avif|heic|heif|gif|bmp|tiff?|ppm)$/i;
export const isPicture = (path) => PICTURE.test(path) && !/(^|\/)(\.|__MACOSX\/)/.test(path);

/** The files of a file input, with their paths in the chosen folder. */
export const chosen = (input) => [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name }));

/** Name the class of each path as the server does: its first folder, but for one that only holds all the others. */
export function classesOf(paths) {
  return inside(paths).map((folders) => (folders.length > 1 ? folders[0] : ""));
}

function inside(paths) {
  const parts = paths.map((path) => path.split("/"));
  return topFolder(paths) ? parts.map((folders) => folders.slice(1)) : parts;
}

/**
 * What each folder holds, where folders seem to be chosen one level too high, as months of classes are; else null.
 * Folders that each hold one folder of the same name are classes, as for the server.
 */
export function tooHigh(paths) {
  const found = new Map();
  for (const folders of inside(paths)) {
    if (folders.length < 3) return null; // a picture of that folder itself
    found.set(folders[0], (found.get(folders[0]) ?? new Set()).add(folders[1]));
  }
  const alike = new Set([...found.values()].map((own) => [...own].sort().join("/"))).size === 1;
  if (!found.size || (found.size > 1 && alike && [...found.values()].every((own) => own.size === 1))) return null;
  return found;
}

/** The second folder of each path: the class, where the first is a month. */
export const innerClassesOf = (paths) => inside(paths).map((folders) => folders[1]);

/** The folder that holds all class folders, if there is one. */
export function topFolder(paths) {
  const parts = paths.map((path) => path.split("/"));
  const one = new Set(parts.map(([first]) => first)).size === 1;
  return one && parts.every((folders) => folders.length > 2) ? parts[0][0] : null;
}
