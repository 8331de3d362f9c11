// The live strip: where the engine's memory is, about once a second while the page is visible.

import { checkReady, getJson } from "./api.js";
import { plural, rate, whole } from "./format.js";

const POLL_MS = 1000;
const RETRY_MS = 4000;
const HOLDERS = ["running", "cached", "quarantined", "free"];
const NAMES = { kv: "KV pages", window: "window pages", state: "state slots", rows: "request rows" };
const CELL_CLASSES = ["free", "running", "cached", "quarantined"]; // frames.State.map's owner classes, in its order
const SPARK_POINTS = 60;

const $ = (id) => document.getElementById(id);

export class Strip {
  // `onServer(state, message)` hears "ready", "not-ready" or "offline"; `onLocked()` that a key is wanted.
  constructor({ onServer, onLocked }) {
    this.onServer = onServer;
    this.onLocked = onLocked;
    this.rates = new Array(SPARK_POINTS).fill(0);
    this.previous = null;
    this.timer = 0;
    this.polling = false;
    document.addEventListener("visibilitychange", () => this.restart());
    $("toggle-map").addEventListener("click", (event) => {
      const open = $("strip").classList.toggle("open");
      event.currentTarget.setAttribute("aria-expanded", String(open));
      event.currentTarget.textContent = open ? "Hide pages" : "Show pages";
    });
    this.restart();
  }

  restart() {
    clearTimeout(this.timer);
    this.previous = null; // a rate over the time the tab was hidden would be no rate of now
    if (!document.hidden && !this.polling) this.poll();
  }

  async poll() {
    this.polling = true;
    let wait = POLL_MS;
    try {
      await checkReady();
      this.onServer("ready", "ready");
      const state = await getJson("debug/state");
      this.show(state);
      $("strip-note").textContent = restNote(state.memory);
    } catch (error) {
      wait = RETRY_MS;
      this.fail(error);
    } finally {
      this.polling = false;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), wait);
  }

  fail(error) {
    if (error.status === 401) this.onLocked();
    else if (error.status === 503) this.onServer("not-ready", error.message);
    else if (!error.status) this.onServer("offline", error.message || "The server did not answer.");
    $("strip-note").textContent = error.status === 401 ? "Enter the key to see the pools." : error.message;
  }

  show(state) {
    $("running").textContent = whole(state.num_running);
    $("waiting").textContent = whole(state.num_waiting);
    this.showRate(state.counters.generated_tokens ?? 0);
    $("pools").replaceChildren(...state.pools.map(poolView));
    $("members").replaceChildren(...(state.members ?? []).map(memberView));
    showMap(state.map ?? []);
  }

  showRate(total) {
    const now = { at: performance.now(), total };
    // A smaller count is a restarted engine.
    const perSecond = this.previous && total >= this.previous.total
      ? ((total - this.previous.total) * 1000) / (now.at - this.previous.at)
      : 0;
    this.previous = now;
    this.rates = [...this.rates.slice(1), perSecond];
    const top = Math.max(...this.rates, 1);
    $("rate").textContent = rate(perSecond);
    const line = this.rates.map((value, i) => `${i + 0.5},${(19 - (value / top) * 18).toFixed(2)}`).join(" ");
    $("spark").querySelector("polyline").setAttribute("points", line);
    $("spark").setAttribute("aria-label", `Tokens per second over the last minute: now ${rate(perSecond)}, most ${rate(top)}`);
  }
}

// Asleep, requests wake it: else it would not be ready.
function restNote(memory) {
  if (!memory || memory.phase === "serving") return "";
  const released = memory.released.join(", ");
  return released ? `The engine is ${memory.phase}: ${released} released.` : `The engine is ${memory.phase}.`;
}

// A server behind a router: whether it takes requests, and how many it has.
function memberView(member) {
  const view = document.createElement("li");
  const name = document.createElement("span");
  name.textContent = member.name;
  const status = document.createElement("span");
  status.className = "ready";
  status.dataset.state = member.up ? "ready" : "not-ready";
  status.textContent = member.up ? plural(member.in_flight, "request") : "down";
  view.title = member.up ? member.url : `${member.url}: ${member.why}`;
  view.append(name, status);
  return view;
}

function poolView(pool) {
  const view = document.createElement("section");
  const title = document.createElement("h3");
  const count = document.createElement("span");
  const name = NAMES[pool.name] ?? pool.name.replaceAll("_", " ");
  count.textContent = `${whole(pool.total - pool.free)} of ${whole(pool.total)}`;
  title.append(name, count);

  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${name}: ${HOLDERS.map((holder) => `${whole(pool[holder] ?? 0)} ${holder}`).join(", ")}`);
  for (const holder of HOLDERS) {
    const part = document.createElement("span");
    part.dataset.holder = holder;
    part.style.flexGrow = String(pool[holder] ?? 0);
    part.hidden = !pool[holder];
    bar.append(part);
  }

  const numbers = document.createElement("p");
  numbers.className = "caption";
  numbers.textContent = HOLDERS.filter((holder) => pool[holder] || holder === "free")
    .map((holder) => `${whole(pool[holder])} ${holder}`)
    .join(" · ");
  view.append(title, bar, numbers);
  return view;
}

function showMap(owners) {
  const map = $("map");
  while (map.childElementCount > owners.length) map.lastElementChild.remove();
  while (map.childElementCount < owners.length) map.append(document.createElement("i"));
  const counts = {};
  owners.forEach((owner, i) => {
    const holder = CELL_CLASSES[owner] ?? "quarantined";
    counts[holder] = (counts[holder] ?? 0) + 1;
    if (map.children[i].dataset.holder !== holder) map.children[i].dataset.holder = holder;
  });
  const said = Object.entries(counts).map(([holder, n]) => `${whole(n)} ${holder}`);
  map.setAttribute("aria-label", said.length ? `Sampled pages: ${said.join(", ")}` : "No pages known yet");
  $("map-caption").textContent = owners.length ? `A sample of ${plural(owners.length, "page")}` : "No pages known yet";
}
