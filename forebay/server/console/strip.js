// The strip: what the engine does, about once a second while anybody can see it.

import { checkReady, getJson, post } from "./api.js";
import { Band } from "./band.js";
import { History, missChart, missList, promptChart, queueChart, speedChart } from "./charts.js";
import { rate, size, whole } from "./format.js";
import { memberView, poolView } from "./pools.js";

const LOOK_MS = 1000;
const RETRY_MS = 4000;
const CLOSED = "forebay.strip"; // "closed" where the user closed it

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 60rem)");

export class Strip {
  // `onServer(state, message, why)` hears "ready", "not-ready" or "offline", and the server's word for why it is not ready;
  // `onLocked()` that a key is wanted.
  constructor({ onServer, onLocked }) {
    Object.assign(this, { onServer, onLocked, timer: 0, isLooking: false, isReady: false, engine: null, mayAct: false });
    this.history = new History();
    this.band = new Band($("band"), $("band-note"), $("band-legend"));
    document.addEventListener("visibilitychange", () => this.restart());
    $("toggle-strip").addEventListener("click", () => this.open(!this.isOpen));
    $("close-strip").addEventListener("click", () => this.open(false));
    narrow.addEventListener("change", () => this.place());
    $("branches").addEventListener("toggle", () => this.showBranches());
    $("effective").addEventListener("toggle", () => this.showSettings());
    $("sleep").addEventListener("click", () => this.sleepOrWake());
    this.place();
  }

  get isOpen() {
    return !$("strip").hidden;
  }

  // Beside the conversation it is open unless it was closed; where it would lie over the conversation, when asked for.
  place() {
    this.lay(narrow.matches ? false : localStorage.getItem(CLOSED) !== "closed");
    this.restart();
  }

  open(open) {
    if (!narrow.matches) localStorage.setItem(CLOSED, open ? "open" : "closed");
    this.lay(open);
    this.restart();
    (open && narrow.matches ? $("close-strip") : $("toggle-strip")).focus();
  }

  lay(open) {
    $("strip").hidden = !open;
    $("toggle-strip").setAttribute("aria-expanded", String(open));
    document.querySelector("main").inert = open && narrow.matches;
  }

  restart() {
    clearTimeout(this.timer);
    this.history.gap(); // a rate over the time in which nobody looked would be no rate of now
    if (this.mayLook && !this.isLooking) this.look();
    this.branches?.look();
  }

  // A request has failed: closed, too, it looks until the server is ready.
  doubt() {
    this.isReady = false;
    if (!this.isOpen) this.restart();
  }

  // Closed, it looks until the server is ready and no longer.
  get mayLook() {
    return !document.hidden && (this.isOpen || !this.isReady);
  }

  async look() {
    this.isLooking = true;
    let wait = LOOK_MS;
    try {
      const rests = await checkReady().catch(whyItRests);
      this.isReady = !rests;
      this.onServer(rests ? "not-ready" : "ready", rests?.message ?? "ready", rests?.code);
      if (this.isOpen && !document.hidden) await this.refresh();
    } catch (error) {
      wait = RETRY_MS;
      this.fail(error);
    } finally {
      this.isLooking = false;
    }
    if (this.mayLook) this.timer = setTimeout(() => this.look(), wait);
  }

  async refresh() {
    const state = await getJson("debug/state");
    if (!this.engine) await this.meet();
    this.show(state);
  }

  // What does not change while the server runs. A router has none of it.
  async meet() {
    const info = await getJson("server_info").catch(() => ({}));
    this.engine = info.engine ?? {};
    this.mayAct = info.may_administer === true;
  }

  fail(error) {
    this.isReady = false;
    this.engine = null; // who comes back may be another
    this.history.gap();
    for (const id of ["running", "waiting", "rate"]) $(id).textContent = "–";
    $("strip").classList.add("stale");
    if (error.status === 401) this.onLocked();
    else if (error.status === 503) this.onServer("not-ready", error.message);
    else if (!error.status) this.onServer("offline", error.message || "The server did not answer.");
    $("strip-note").textContent = error.status === 401 ? "Enter the key to see the engine." : error.message;
    if (error.status === 403 || error.status === 404) {
      this.isReady = true; // it serves, and does not tell
      $("strip-note").textContent = "What the engine counts over all clients is for an admin key.";
    }
  }

  show(state) {
    this.history.take(state);
    $("strip").classList.remove("stale");
    $("running").textContent = whole(state.num_running);
    $("waiting").textContent = whole(state.num_waiting);
    $("rate").textContent = rate(this.history.last?.generated ?? 0);
    const told = JSON.stringify([state.pools, this.engine]);
    if (told !== this.told) keepFocus($("pools"), () => $("pools").replaceChildren(...state.pools.map((pool) => poolView(pool, this.engine))));
    this.told = told;
    $("members").replaceChildren(...(state.members ?? []).map(memberView));
    $("charts").replaceChildren(...[speedChart, promptChart, queueChart, missChart].map((chart) => chart(this.history, state.counters)));
    $("misses").replaceChildren(...missList(state.counters));
    this.showRest(state.memory);
  }

  // Asleep, requests wake it: else it would not be ready.
  showRest(memory) {
    const phase = memory?.phase ?? "serving";
    $("strip-note").textContent = restNote(phase, memory);
    const button = $("sleep");
    button.hidden = !memory || !this.mayAct;
    button.disabled = phase === "draining" || phase === "waking";
    button.dataset.asleep = String(phase === "asleep");
    button.textContent = phase === "asleep" ? "Wake the engine" : "Put the engine to sleep";
  }

  async sleepOrWake() {
    const button = $("sleep");
    button.disabled = true;
    try {
      await post(button.dataset.asleep === "true" ? "wake_up" : "sleep");
      await this.refresh();
    } catch (error) {
      $("strip-note").textContent = error.message;
    }
    button.disabled = false;
  }

  async showBranches() {
    if (!$("branches").open) return;
    const { Branches } = await import("./branches.js");
    const isSeen = () => this.isOpen && $("branches").open && !document.hidden;
    if (this.branches) this.branches.look();
    else this.branches = new Branches($("branch-rows"), $("branch-note"), $("what-if"), isSeen);
  }

  async showSettings() {
    if (!$("effective").open) return;
    const { Effective } = await import("./effective.js");
    if (this.effective) this.effective.load();
    else this.effective = new Effective($("effective-search"), $("effective-rows"), $("effective-note"));
  }
}

// What takes no requests, but lives and tells.
function whyItRests(error) {
  if (error.status === 503 && ["asleep", "waking", "draining", "queue_full"].includes(error.code)) return error;
  throw error;
}

function restNote(phase, memory) {
  if (phase === "serving") return "";
  const bytes = memory.released.reduce((sum, tag) => sum + (memory.num_bytes?.[tag] ?? 0), 0);
  const released = memory.released.map((tag) => tag.replaceAll("_", " ").replace("kv", "KV")).join(", ");
  return `The engine is ${phase}${released ? `: ${released} released${bytes ? `, ${size(bytes)}` : ""}` : ""}.`;
}

// What is redrawn keeps the focus at the place where it was.
function keepFocus(box, redraw) {
  const at = [...box.children].indexOf(document.activeElement);
  redraw();
  if (at >= 0) box.children[at]?.focus({ preventScroll: true });
}
