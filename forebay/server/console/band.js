// What each answer of this conversation took: its tokens from the first to the last, by where they came from.

import { plural, whole } from "./format.js";
import { make } from "./nodes.js";
import { draw, picture, share } from "./svg.js";

const MAX_ROWS = 8;
const MIN_SCALE = 64; // tokens: a short first answer does not fill the band
const LONGEST = 60; // characters of a text that is quoted

// Why a prompt was not all in the cache, as `usage.cache.miss_reason` has it.
const WHY = {
  cache_disabled: "the prefix cache is off",
  no_shared_prefix: "nothing in the cache begins like this",
  released: "the cache was given back while the engine slept",
  diverged: "the text differs here from what was cached",
  not_cached_yet: "nobody had asked for what comes here",
  evicted: "what follows was evicted to make room",
  evicted_from_disk: "what follows was removed from the files to make room",
  not_loaded_in_time: "another tier has what follows, but copying it failed or takes longer",
  kv_present_state_missing: "no state was kept further on, though keys and values were",
  kv_present_window_missing: "its window is gone further on, though keys and values are there",
  below_page: "less than a page is not kept",
  prompt_logprobs: "log-probabilities need every position computed",
  pooling: "a vector of the whole text needs every position computed",
  retracted: "it was computed again after a retraction",
};

// The parts of one answer's band, in tokens. `computed` is what of the prompt had to be.
export function partsOf(usage) {
  const { cache = {}, prompt_tokens: prompt, completion_tokens: generated } = usage;
  const reused = cache.cached_tokens ?? usage.prompt_tokens_details?.cached_tokens ?? 0;
  return {
    prompt,
    reused,
    computed: prompt - reused,
    generated,
    again: cache.recomputed_tokens ?? 0,
    checkpoints: cache.checkpoints ?? [],
    total: prompt + generated,
  };
}

// "Left the cache at token 412 of 530: the text differs here from what was cached: “now”, where “then” stood."
export function leaving(usage) {
  const { prompt, reused } = partsOf(usage);
  const { miss_reason: reason = "none", differs, matched_tokens: matched } = usage.cache ?? {};
  if (reason === "none") return reused ? "Everything that could be reused was." : "";
  const isHere = differs && reason === "diverged";
  const at = isHere ? differs.position : reused;
  const place = at ? `Left the cache at token ${whole(at)} of ${whole(prompt)}` : "Nothing was reused";
  const text = differs && `${quoted(differs.here)}, where ${quoted(differs.there)} stood`;
  const reach = matched?.kv > reused ? `, up to token ${whole(matched.kv)}` : "";
  if (isHere) return `${place}: ${WHY[reason]}: ${text}.`;
  const further = text ? ` From token ${whole(differs.position)} on the text differs from what was cached: ${text}.` : "";
  return `${place}: ${WHY[reason] ?? reason}${reach}.${further}`;
}

const quoted = (text) => `“${text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text.replaceAll("\n", "⏎")}”`;

function inWords(usage, number) {
  const { reused, computed, generated, again, checkpoints } = partsOf(usage);
  const parts = [`${whole(reused)} reused`, `${whole(computed)} computed`, `${whole(generated)} generated`];
  if (again) parts.push(`${whole(again)} computed again after ${plural(usage.cache.retractions, "retraction")}`);
  if (checkpoints.length) parts.push(`${plural(checkpoints.length, "checkpoint")}`);
  return `Answer ${number}: ${parts.join(", ")}`;
}

export class Band {
  // `list` takes a row for each answer, `note` the words about the chosen one.
  constructor(list, note, legend) {
    Object.assign(this, { list, note, legend, answers: [], chosen: -1 });
    document.addEventListener("forebay:conversation", (event) => this.show(event.detail));
    this.show([]);
  }

  // The usage of each answer of the conversation, the first first; null for one of which nothing is known.
  show(usages) {
    const before = this.answers.length;
    this.answers = usages.map((usage, i) => ({ usage, number: i + 1 })).filter(({ usage }) => usage?.prompt_tokens);
    // While an answer grows, one that is being looked at stays chosen.
    const isLookedAt = this.list.matches(":hover, :focus-within");
    if (!isLookedAt || this.answers.length !== before) this.chosen = this.answers.length - 1;
    this.draw();
  }

  draw() {
    const shown = this.answers.slice(-MAX_ROWS);
    const most = Math.max(MIN_SCALE, ...shown.map(({ usage }) => partsOf(usage).total));
    while (this.list.children.length > shown.length) this.list.lastElementChild.remove();
    shown.forEach(({ usage, number }, i) => {
      const button = this.list.children[i]?.firstElementChild ?? this.addRow();
      button.dataset.number = number;
      button.replaceChildren(bandOf(usage, inWords(usage, number), most));
    });
    this.legend.hidden = !shown.length;
    for (const item of this.legend.children)
      item.hidden = !shown.some(({ usage }) => [].concat(partsOf(usage)[item.dataset.part]).some(Boolean));
    this.say();
  }

  addRow() {
    const button = make("button", "turn");
    button.type = "button";
    for (const look of ["click", "focus", "pointerenter"]) button.addEventListener(look, () => this.choose(Number(button.dataset.number)));
    this.list.append(make("li", "", button));
    return button;
  }

  choose(number) {
    this.chosen = this.answers.findIndex((answer) => answer.number === number);
    this.say();
  }

  say() {
    const answer = this.answers[this.chosen];
    for (const button of this.list.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.number) === answer?.number));
    if (!answer) {
      this.note.replaceChildren("Ask something: its tokens are drawn here, by where they came from.");
      return;
    }
    const first = make("strong", "", `${inWords(answer.usage, answer.number)}. `);
    this.note.replaceChildren(first, leaving(answer.usage));
  }
}

function bandOf(usage, words, most) {
  const { reused, computed, generated, again, checkpoints, prompt } = partsOf(usage);
  const parts = [];
  let start = 0;
  for (const [part, count] of [["reused", reused], ["computed", computed], ["generated", generated]]) {
    if (count) parts.push(draw("rect", { x: share(start, most), y: 5, width: share(count, most), height: 14, "data-part": part }));
    start += count;
  }
  // What was computed a second time lies below what was computed at all.
  if (again) parts.push(draw("rect", { x: share(Math.max(0, start - again), most), y: 21, width: share(Math.min(again, start), most), height: 3, "data-part": "again" }));
  for (const at of checkpoints) parts.push(draw("rect", { class: "tick", x: share(at, most), y: 1, width: 1.5, height: 22, "data-part": "checkpoints" }));
  const left = usage.cache?.miss_reason && usage.cache.miss_reason !== "none" && reused > 0 && reused < prompt;
  if (left) parts.push(draw("svg", { x: share(reused, most), overflow: "visible" }, draw("path", { class: "left", d: "M-4 0h8l-4 5z" })));
  return picture("band", words, { height: 25, width: "100%" }, ...parts);
}
