// Wires the page: conversations, composer, settings, the key, the model's name, and the strip.

import { getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Toast } from "./controls.js";
import { whole } from "./format.js";
import { Options } from "./options.js";
import { Panel } from "./panel.js";
import { listen } from "./shortcuts.js";
import { Store } from "./store.js";
import { Strip } from "./strip.js";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 60rem)");

let model = "";

const known = async () => {
  if (!model) await showModel(); // whoever types at once may be quicker than the first poll
};

const refresh = (id) => id === chat.conversation?.id && chat.refresh();
const say = (text) => ($("announcer").textContent = text);
const toast = new Toast($("toast"), () => $(narrow.matches && isPanelOpen() ? "search" : "conversation").focus());
const options = new Options($("settings"), $("settings-form"), { onChange: (values) => chat.set({ options: values }) });
const store = new Store({
  onTrouble: (text) => {
    $("trouble").textContent = text;
    $("trouble").hidden = false;
  },
  onChange: (id) => {
    panel.draw();
    refresh(id);
  },
});
const panel = new Panel({
  store,
  toast,
  onGone: (id) => id === chat.conversation.id && begin(),
  onBack: (id) => {
    if (!chat.busy) location.hash = `c=${id}`; // else it would end the answer
  },
  onNamed: ({ id, title }) => id === chat.conversation.id && chat.set({ title }),
  onJoined: refresh,
});
const chat = new Chat({
  list: $("turns"),
  scroller: $("conversation"),
  store,
  settings: options,
  model: () => known().then(() => model),
  onBusy: showBusy,
  onFailed: ({ locked }) => {
    if (locked) return askForKey();
    model = ""; // a server that was started again may have another
    strip.doubt();
  },
  onOpen: showConversation,
  say,
  toast,
});
const composer = new Composer({
  form: $("composer"),
  box: $("prompt"),
  files: $("files"),
  waiting: $("waiting-message"),
  picker: $("picker"),
  onSend: (text, files) => {
    toast.end();
    chat.send(text, files);
  },
  say: (text) => toast.show(text),
  known,
});
composer.takeDrops($("chat"));

function showBusy(busy, { completed = false } = {}) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("welcome").hidden = busy || !chat.isEmpty;
  if (busy) say("The model is answering.");
  composer.setBusy(busy, completed);
  // The button that had the focus may just have vanished.
  if (document.activeElement === document.body && !narrow.matches) $("prompt").focus();
}

function showConversation(conversation) {
  document.title = chat.isEmpty ? "Forebay" : `${conversation.title} – Forebay`;
  options.show(conversation.options);
  if (!chat.isEmpty && location.hash !== `#c=${conversation.id}`) history.replaceState(null, "", `#c=${conversation.id}`);
  panel.show(conversation);
}

// The conversation that the address names, or a new one.
async function route() {
  const id = /^#c=(\w+)$/.exec(location.hash)?.[1];
  if (id && id === chat.conversation?.id) return;
  showPanel(narrow.matches ? false : isPanelOpen());
  if (id && (await chat.open(id))) return;
  if (id) history.replaceState(null, "", location.pathname);
  if (id || !chat.isEmpty) chat.fresh();
}

function begin() {
  if (!chat.isEmpty) history.pushState(null, "", location.pathname);
  chat.fresh();
  showPanel(narrow.matches ? false : isPanelOpen());
  say("New chat.");
  $("prompt").focus();
}

addEventListener("popstate", route);

const isPanelOpen = () => !$("panel").hidden;

// On a narrow page the panel lies over the rest, which cannot be reached meanwhile.
function showPanel(open) {
  $("panel").hidden = !open;
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  const over = open && narrow.matches;
  for (const part of [...$("chat").children, $("strip")]) part.inert = over; // a landmark stays one
  document.body.classList.toggle("drawer", over);
  if (over) $("panel").append($("toast"));
  else $("composer").before($("toast"));
  if (over) $("search").focus();
}

function togglePanel() {
  showPanel(!isPanelOpen());
  if (!isPanelOpen()) $("toggle-panel").focus();
}

narrow.addEventListener("change", () => showPanel(!narrow.matches));
$("toggle-panel").addEventListener("click", togglePanel);
$("columns").addEventListener("click", (event) => event.target === event.currentTarget && narrow.matches && showPanel(false));
showPanel(!narrow.matches);

const strip = new Strip({ onServer: showServer, onLocked: askForKey });

async function showServer(state, message, why) {
  const ready = $("ready");
  const word = { asleep: "asleep", waking: "waking", queue_full: "full" }[why] ?? state.replace("-", " ");
  if (ready.textContent !== word || ready.title !== message) {
    ready.dataset.state = state;
    ready.textContent = word;
    ready.title = message;
  }
  if (state === "offline") model = "";
  else if (!model) await showModel();
}

async function showModel() {
  try {
    const { data } = await getJson("v1/models");
    model = data[0].id;
    const context = data[0].max_model_len;
    $("model").textContent = model;
    $("model").title = context ? `context of ${whole(context)} tokens` : "";
    const { sampling, accepts_images: pictures } = await getJson("server_info").catch(() => ({})); // a router has no sampling
    composer.takePictures(Boolean(pictures));
    options.showServer({ sampling, models: data.map(({ id }) => id) });
  } catch (error) {
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  const ready = $("ready");
  ready.dataset.state = "not-ready";
  ready.textContent = "key wanted";
  if (!$("key-form").hidden) return;
  $("wrong-key").hidden = !hasKey();
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
  const last = chat.path.at(-1);
  if (last?.error) chat.regenerate(last);
});

$("stop").addEventListener("click", () => {
  chat.stop();
  $("prompt").focus();
});
$("new-chat").addEventListener("click", begin);
$("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (example) chat.send(example.textContent);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which conversation is open
  $("prompt").focus();
});

listen({
  stop: () => {
    if (narrow.matches && isPanelOpen()) togglePanel();
    else if (narrow.matches && strip.isOpen) strip.open(false);
    else chat.stop();
  },
  begin,
  search: () => {
    showPanel(true);
    $("search").focus();
  },
  togglePanel,
  settings: () => $("settings").showModal(),
  edit: () => chat.editLast(),
  regenerate: () => chat.path.at(-1) && chat.regenerate(chat.path.at(-1)),
});

$("prompt").focus();
chat.fresh(); // whoever types at once has something to type into
$("welcome").hidden = location.hash.startsWith("#c=");
await route();
await store.tidy();
