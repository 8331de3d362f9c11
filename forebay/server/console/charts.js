// The last minutes: what the engine counted between one look and the next, drawn as it comes.

import { plural, rate, whole } from "./format.js";
import { make } from "./nodes.js";
import { draw, picture } from "./svg.js";

const KEPT = 300; // looks, about five minutes
const LEAST = 60; // that are drawn over the whole width
const HEIGHT = 40;

const REASONS = {
  none: "all reused",
  no_shared_prefix: "a new beginning",
  not_cached_yet: "new from there on",
  diverged: "differs from what was cached",
  evicted: "evicted to make room",
  evicted_from_disk: "removed from the files",
  not_loaded_in_time: "in another tier, not copied",
  released: "given back while asleep",
  kv_present_state_missing: "no state to go on from",
  kv_present_window_missing: "its window is gone",
  below_page: "shorter than a page",
  cache_disabled: "the cache is off",
  prompt_logprobs: "every position was asked for",
  pooling: "every position was asked for",
};

// What is drawn of each pair of looks, per second; null where there is none: the tab was hidden, or the engine began anew.
export class History {
  constructor() {
    this.points = [];
    this.previous = null;
  }

  gap() {
    if (this.previous) this.add(null);
    this.previous = null;
  }

  take(state) {
    const { counters } = state;
    const now = { at: performance.now(), counters };
    const before = this.previous;
    this.previous = now;
    const isNew = before && names.some((name) => (counters[name] ?? 0) < (before.counters[name] ?? 0));
    const seconds = before && (now.at - before.at) / 1000;
    if (!seconds || isNew) return this.add(null);
    const per = (name) => ((counters[name] ?? 0) - (before.counters[name] ?? 0)) / seconds;
    this.add({
      generated: per("generated_tokens"),
      computed: per("computed_prompt_tokens"),
      reused: per("cached_tokens"),
      retracted: per("retractions") * seconds,
      whole: per("misses.none"),
      partly: reasonsOf(counters).reduce((sum, reason) => sum + (reason === "none" ? 0 : per(`misses.${reason}`)), 0),
      running: state.num_running,
      waiting: state.num_waiting,
    });
  }

  add(point) {
    this.points.push(point);
    if (this.points.length > KEPT) this.points.shift();
  }

  get last() {
    return this.points.at(-1);
  }
}

const reasonsOf = (counters) => Object.keys(counters).flatMap((name) => (name.startsWith("misses.") ? [name.slice("misses.".length)] : []));
const names = ["generated_tokens", "prompt_tokens", "cached_tokens"];

// Layers of areas, one on top of the other: [[class, value of a point], ...].
function areas(points, layers, className, words) {
  const width = Math.max(LEAST, points.length);
  const sums = points.map((point) => (point ? layers.reduce((sum, [, of]) => sum + of(point), 0) : 0));
  const top = Math.max(1e-9, ...sums);
  const floor = points.map(() => 0);
  const paths = layers.map(([name, of]) => {
    const path = draw("path", { class: name, d: "" });
    let d = "";
    points.forEach((point, i) => {
      if (!point) return;
      const y = (value) => (HEIGHT - (value / top) * (HEIGHT - 2)).toFixed(2);
      const from = floor[i];
      const value = of(point);
      floor[i] += value;
      const x = width - points.length + i;
      if (value > 0) d += `M${x} ${y(from)}V${y(floor[i])}h1.05V${y(from)}z`;
    });
    path.setAttribute("d", d);
    return path;
  });
  const box = { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", height: HEIGHT, width: "100%" };
  const marks = points.flatMap((point, i) => (point?.retracted ? [draw("rect", { class: "retracted", x: width - points.length + i, y: 0, width: 1, height: HEIGHT })] : []));
  return picture(`chart ${className}`, words, box, ...paths, ...marks);
}

function chart(title, value, image) {
  return make("section", "over-time", make("h3", "", title, make("span", "", value)), image);
}

export function speedChart({ points, last }) {
  const most = Math.max(0, ...points.map((point) => point?.generated ?? 0));
  const words = `Tokens generated per second over the last minutes: now ${rate(last?.generated ?? 0)}, most ${rate(most)}`;
  return chart("Generated", `${rate(last?.generated ?? 0)} tok/s`, areas(points, [["generated", (p) => p.generated]], "speed", words));
}

export function promptChart({ points, last }, counters) {
  const { prompt_tokens: asked = 0, cached_tokens: saved = 0 } = counters;
  const share = asked ? `${Math.round((100 * saved) / asked)} % reused` : "";
  const words = `Prompt tokens over the last minutes, reused and computed; since the start ${whole(saved)} of ${whole(asked)} were reused; now ${rate(last?.computed ?? 0)} computed per second`;
  const layers = [["reused", (p) => p.reused], ["computed", (p) => p.computed]];
  const view = chart("Prompts", share, areas(points, layers, "prompts", words));
  view.append(make("p", "caption", asked ? `${plural(saved, "token")} saved, ${rate(last?.computed ?? 0)} computed/s` : "No prompt yet"));
  return view;
}

export function queueChart({ points, last }, counters) {
  const retractions = counters.retractions ?? 0;
  const words = `Requests over the last minutes: now ${whole(last?.running ?? 0)} running, ${whole(last?.waiting ?? 0)} waiting; ${plural(retractions, "retraction")} since the start`;
  const layers = [["generated", (p) => p.running], ["waiting", (p) => p.waiting]];
  return chart("Requests", retractions ? plural(retractions, "retraction") : "", areas(points, layers, "queue", words));
}

export function missChart({ points }, counters) {
  const all = reasonsOf(counters).reduce((sum, reason) => sum + counters[`misses.${reason}`], 0);
  const words = `Prompts over the last minutes, those reused whole and the others; ${whole(all)} since the start`;
  const layers = [["reused", (p) => p.whole], ["computed", (p) => p.partly]];
  return chart("What was reused of prompts", all ? `${whole(all)} so far` : "", areas(points, layers, "misses-chart", words));
}

// Why prompts were not reused whole, since the start, the most frequent reason first.
export function missList(counters) {
  const found = reasonsOf(counters)
    .map((reason) => [reason, counters[`misses.${reason}`]])
    .filter(([, count]) => count)
    .sort(([, a], [, b]) => b - a);
  const most = Math.max(1, ...found.map(([, count]) => count));
  return found.map(([reason, count]) => {
    const meter = make("span", "meter");
    meter.style.setProperty("--share", String(count / most));
    const row = make("li", "", make("span", "", REASONS[reason] ?? reason.replaceAll("_", " ")), make("span", "number", whole(count)), meter);
    row.dataset.hit = String(reason === "none");
    return row;
  });
}
