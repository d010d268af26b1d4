// Saves what is shown, and opens what was saved. Nothing leaves the browser.

import { byId } from "./dom.js";
import { reopen } from "./recording.js";

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size",
  "font-weight"];

function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

export function saveRecording(recording) {
  save("graft-recording.json", "application/json", JSON.stringify(recording, null, 1));
}

// A drawing that looks the same without the page: its styles are written on its elements.
export function standalone(drawing) {
  const copy = drawing.cloneNode(true);
  const originals = [drawing, ...drawing.querySelectorAll("*")];
  const copies = [copy, ...copy.querySelectorAll("*")];
  copies.forEach((element, place) => {
    const style = getComputedStyle(originals[place]);
    for (const name of STYLES) element.setAttribute(name, style.getPropertyValue(name));
    element.removeAttribute("class");
  });
  const ground = drawing.ownerDocument.createElementNS(drawing.namespaceURI, "rect");
  ground.setAttribute("width", "100%");
  ground.setAttribute("height", "100%");
  ground.setAttribute("fill", getComputedStyle(drawing.parentElement).backgroundColor);
  copy.prepend(ground);
  return new XMLSerializer().serializeToString(copy);
}

export function saveDrawing() {
  const drawing = byId("tree").querySelector("svg");
  if (drawing) save("graft-tree.svg", "image/svg+xml", standalone(drawing));
}

// opened(recording) or failed(sentence) is called once a file was chosen and read.
export function watchFile(opened, failed) {
  const field = byId("file");
  byId("load").addEventListener("click", () => field.click());
  field.addEventListener("change", async () => {
    const [file] = field.files;
    if (!file) return;
    try {
      opened(reopen(await file.text()));
    } catch (error) {
      failed(error.message);
    }
    field.value = "";
  });
}
