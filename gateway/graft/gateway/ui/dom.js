// Makes elements. Text is always set as text, so nothing a model writes can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A drawing that is one picture to those who cannot see it: `label` says what it shows.
export function picture(label, width, height, ...children) {
  return svg("svg", { role: "img", "aria-label": label, width, height,
    viewBox: `0 0 ${width} ${height}`, xmlns: SVG }, ...children);
}

export const byId = (id) => document.getElementById(id);

// A token as it is seen: blanks made visible, and cut where it would not fit.
export function seen(text, most = 9) {
  const marked = text.replace(/^ /, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  const letters = [...(marked === "" ? "∅" : marked)];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : letters.join("");
}

export function percent(share) {
  if (share === null || share === undefined) return "";
  if (share > 0 && share < 0.01) return "<1%";
  return `${Math.round(share * 100)}%`;
}

export function millis(micros) {
  const value = micros / 1000;
  return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(value < 1 ? 2 : 1)} ms`;
}
