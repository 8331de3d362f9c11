// Wires the page: composer, settings, the key, the model's name, and the strip.

import { getJson, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { whole } from "./format.js";
import { Strip } from "./strip.js";
import { Settings } from "./settings.js";

const $ = (id) => document.getElementById(id);

const settings = new Settings($("settings"), $("settings-form"));
let model = "";

const chat = new Chat({
  list: $("turns"),
  scroller: $("conversation"),
  settings,
  model: async () => {
    if (!model) await showModel(); // whoever types at once may be quicker than the first poll
    return model;
  },
  onBusy: showBusy,
  onLocked: askForKey,
  say: (text) => ($("announcer").textContent = text),
});

const strip = new Strip({ onServer: showServer, onLocked: askForKey });

function showBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("welcome").hidden = busy || chat.messages.length > 0;
  if (busy) $("announcer").textContent = "The model is answering.";
  // The button that had the focus may just have vanished.
  if (document.activeElement === document.body) $("prompt").focus();
}

async function showServer(state, message) {
  const ready = $("ready");
  if (ready.dataset.state !== state || ready.title !== message) {
    ready.dataset.state = state;
    ready.textContent = { ready: "ready", "not-ready": "not ready", offline: "offline" }[state];
    ready.title = message;
  }
  if (state === "ready" && !model) await showModel();
}

async function showModel() {
  try {
    const { data } = await getJson("v1/models");
    model = data[0].id;
    const context = data[0].max_model_len;
    $("model").textContent = model;
    $("model").title = context ? `context of ${whole(context)} tokens` : "";
  } catch (error) {
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  const ready = $("ready");
  ready.dataset.state = "not-ready";
  ready.textContent = "key wanted";
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("api-key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("api-key").value.trim());
  $("api-key").value = "";
  $("key-form").hidden = true;
  $("prompt").focus();
  strip.restart();
  if (chat.answer?.error) chat.regenerate();
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || chat.busy) return;
  $("prompt").value = "";
  grow();
  chat.send(text);
});

$("prompt").addEventListener("keydown", (event) => {
  // An input method's Enter takes a candidate; it does not send.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("prompt").addEventListener("input", grow);

function grow() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) chat.stop();
});

$("stop").addEventListener("click", () => {
  chat.stop();
  $("prompt").focus();
});

$("new-chat").addEventListener("click", () => {
  chat.clear();
  $("announcer").textContent = "New chat.";
  $("prompt").focus();
});

$("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (example) chat.send(example.textContent);
});

$("prompt").focus();
