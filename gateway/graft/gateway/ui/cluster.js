// The replicas behind the gateway and how they are, asked for every few seconds.

import { get, Refused } from "./api.js";
import { byId, html, picture, svg } from "./dom.js";

const EVERY_MS = 4000;
const BOX = { width: 168, height: 44, gap: 10 };

function replica(x, y, title, state, detail) {
  return svg("g", { class: `replica ${state}`, transform: `translate(${x} ${y})` },
    svg("title", {}, detail || state),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
    svg("text", { x: 10, y: 18 }, title),
    svg("text", { class: "small", x: 10, y: 34 }, `${state}${detail ? `, ${detail}` : ""}`));
}

function column(kind, replicas, x) {
  return replicas.map((one, place) => {
    const y = place * (BOX.height + BOX.gap);
    const count = `${one.sessions} session${one.sessions === 1 ? "" : "s"}`;
    return { x, y, element: replica(x, y, `${kind} ${one.address}`, one.state, count) };
  });
}

// Draft and verify talk to each other; the gateway stands beside them.
export function drawCluster(info, width) {
  const narrow = width < 3 * BOX.width + 80;
  const gap = narrow ? 24 : Math.min(90, (width - 3 * BOX.width - 4) / 2);
  const verify = column("verify", info.verify, narrow ? 0 : BOX.width + gap);
  const draft = column("draft", info.draft, narrow ? 0 : 2 * (BOX.width + gap));
  const gateway = { x: 0, y: 0, element: replica(0, 0, "gateway", info.state === "ready" ? "up" :
    info.state, `${info.num_in_flight} answers`) };
  if (narrow) stack([[gateway], verify, draft], gap);
  const all = [gateway, ...verify, ...draft];
  const wires = narrow ? [] : verify.flatMap((one) => [wire(gateway, one),
    ...draft.map((other) => wire(one, other))]);
  const height = Math.max(...all.map((one) => one.y)) + BOX.height + 2;
  const words = all.map((one) => one.element.querySelector("text").textContent + " " +
    one.element.querySelector("text.small").textContent);
  const drawn = narrow ? BOX.width + 2 : 3 * BOX.width + 2 * gap + 2;
  const everything = svg("g", { transform: "translate(1 1)" }, ...wires,
    ...all.map((one) => one.element));
  return picture(`Cluster: ${words.join("; ")}`, drawn, height + 1, everything);
}

function stack(groups, gap) {
  let y = 0;
  for (const group of groups) {
    for (const one of group) {
      one.x = 0;
      one.y = y;
      one.element.setAttribute("transform", `translate(0 ${y})`);
      y += BOX.height + BOX.gap;
    }
    y += gap - BOX.gap;
  }
}

function wire(from, to) {
  const [x1, y1] = [from.x + BOX.width, from.y + BOX.height / 2];
  const [x2, y2] = [to.x, to.y + BOX.height / 2];
  const middle = (x1 + x2) / 2;
  return svg("path", { class: "wire", d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
}

export class ClusterView {
  // told(info) is called with each new server_info, denied() when the key is not accepted.
  constructor(told, denied) {
    this.told = told;
    this.denied = denied;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.look());
  }

  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      const ready = await get("ready");
      const degraded = ready.state === "ready" && ready.detail;
      this.say(degraded ? "degraded" : ready.state, ready.detail);
      const info = await get("server_info");
      this.told(info);
      const host = byId("cluster");
      host.replaceChildren(drawCluster(info, host.clientWidth || 560));
      if (info.detail) host.append(html("p", { class: "note" }, info.detail));
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        this.denied();
        return;
      }
      this.say("unreachable", String(error.message));
    }
    this.timer = setTimeout(() => this.look(), EVERY_MS);
  }

  say(state, detail) {
    const health = byId("health");
    if (health.dataset.state !== state) health.textContent = state;
    health.dataset.state = state;
    health.title = detail ?? "";
  }
}
