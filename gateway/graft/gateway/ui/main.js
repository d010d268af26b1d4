// Joins the parts of the page: a question, its answer as it comes, and the rounds behind it.

import { Refused, stream } from "./api.js";
import { ClusterView } from "./cluster.js";
import { Conversation, summary } from "./conversation.js";
import { byId } from "./dom.js";
import { saveDrawing, saveRecording, watchFile } from "./files.js";
import { keyDialog } from "./key.js";
import { Panel } from "./panel.js";
import { offerTiers, parameters, watchTier } from "./parameters.js";
import { Recording } from "./recording.js";

let model = "";
let running = null;

const conversation = new Conversation(byId("messages"), (recording, place) => {
  panel.stopFollowing();
  panel.show(recording.roundOfToken(place), recording);
});
const panel = new Panel((recording, number, decided, millis) =>
  conversation.mark(recording, number, decided, millis));
const cluster = new ClusterView((info) => {
  model = info.model;
  byId("model").textContent = info.model;
  offerTiers(info.speculation);
}, () => askForKey());
const askForKey = keyDialog(() => cluster.look());

function fail(sentence) {
  byId("error").textContent = sentence;
  byId("error").hidden = !sentence;
}

function controls() {
  const busy = running !== null;
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("again").disabled = busy || conversation.empty;
  byId("clear").disabled = busy || conversation.empty;
  byId("hint").hidden = !conversation.empty;
}

async function write(fields) {
  const messages = conversation.messages;
  const recording = new Recording(messages.at(-1).content, model, fields);
  running = new AbortController();
  fail("");
  conversation.answer(recording);
  panel.open(recording, true);
  controls();
  let note = "";
  try {
    const body = { ...fields, messages, return_token_ids: true, speculation_trace: true,
      stream_options: { include_usage: true } };
    for await (const chunk of stream("v1/chat/completions", body, running.signal)) {
      if (recording.take(chunk)) {
        conversation.grow(recording);
        panel.refresh();
      }
    }
  } catch (error) {
    note = error.name === "AbortError" ? `stopped, ${summary(recording)}` : "failed";
    if (error.name !== "AbortError") fail(String(error.message));
    if (error instanceof Refused && error.status === 401) askForKey();
  }
  running = null;
  conversation.close(recording, note);
  if (!recording.tokens.length && note === "failed") conversation.takeBack();
  panel.finish();
  controls();
  byId("announce").textContent = note || `Answer finished: ${summary(recording)}`;
}

function send() {
  const words = byId("words").value.trim();
  const fields = parameters();
  if (!words || running || fields === null) return;
  byId("words").value = "";
  conversation.ask(words);
  write(fields);
}

function again() {
  const fields = parameters();
  if (running || conversation.empty || fields === null) return;
  conversation.takeBack();
  write(fields);
}

function view(name) {
  document.body.dataset.view = name;
  byId("view-chat").setAttribute("aria-pressed", String(name === "chat"));
  byId("view-rounds").setAttribute("aria-pressed", String(name === "rounds"));
  panel.refresh();
  cluster.look();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("again").addEventListener("click", again);
byId("clear").addEventListener("click", () => {
  conversation.clear();
  controls();
  byId("words").focus();
});
byId("save-json").addEventListener("click", () => saveRecording(panel.recording));
byId("save-svg").addEventListener("click", saveDrawing);
byId("view-chat").addEventListener("click", () => view("chat"));
byId("view-rounds").addEventListener("click", () => view("rounds"));
watchFile((recording) => {
  conversation.clear();
  conversation.ask(recording.words);
  conversation.answer(recording);
  conversation.close(recording, "");
  panel.open(recording, false);
  panel.show(0);
  controls();
}, fail);
watchTier();
controls();
cluster.look();
