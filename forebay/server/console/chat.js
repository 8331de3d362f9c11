// The conversation: what was said, and the nodes that show it.

import { streamChat } from "./api.js";
import { statsLine } from "./format.js";
import { render } from "./markdown.js";

const NEAR_END_PX = 80;

// One answer being written: its text, its timing, and its article.
class Answer {
  constructor({ onRegenerate }) {
    this.text = "";
    this.error = null;
    this.usage = null;
    this.finish = "";
    this.firstAt = null;
    this.frame = 0;
    this.view = articleOf("answer", "Answer");
    this.body = make("div", "body");
    this.body.setAttribute("aria-busy", "true");
    this.note = make("p", "error");
    this.note.setAttribute("role", "alert");
    this.note.hidden = true;
    this.stats = make("p", "stats");
    this.tools = make("p", "tools", button("Copy", (self) => copyFrom(self, this.text)), button("Regenerate", onRegenerate));
    this.tools.hidden = true;
    this.view.append(this.body, this.note, make("div", "foot", this.stats, this.tools));
  }

  async run(body, signal, onText) {
    const start = performance.now();
    let lastAt = start;
    try {
      for await (const chunk of streamChat(body, signal)) {
        this.usage = chunk.usage ?? this.usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        this.finish = choice.finish_reason ?? this.finish;
        if (choice.delta?.content) {
          lastAt = performance.now();
          this.firstAt ??= lastAt;
          this.text += choice.delta.content;
          this.draw(onText);
        }
      }
    } catch (error) {
      if (signal.aborted) this.finish = "stopped";
      else this.error = error;
    }
    this.end(start, lastAt);
    onText();
  }

  // At most once per frame, however fast the tokens come.
  draw(after) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      render(this.body, this.text);
      after();
    });
  }

  end(start, lastAt) {
    cancelAnimationFrame(this.frame);
    render(this.body, this.text);
    this.body.setAttribute("aria-busy", "false");
    this.note.hidden = !this.error;
    this.note.textContent = this.error?.message ?? "";
    this.stats.textContent = statsLine({
      usage: this.usage,
      firstTokenMs: this.firstAt === null ? null : this.firstAt - start,
      generationMs: this.firstAt === null ? 0 : lastAt - this.firstAt,
      finish: this.error ? "" : this.finish,
    });
    this.tools.hidden = false;
  }
}

export class Chat {
  // `settings` has `values.system` and `sampling()`; `onBusy(bool)`, `onLocked()` and `say(text)` are the page's.
  constructor({ list, scroller, settings, model, onBusy, onLocked, say }) {
    Object.assign(this, { list, scroller, settings, model, onBusy, onLocked, say });
    this.messages = [];
    this.answer = null;
    this.abort = null;
    list.addEventListener("click", (event) => {
      const copier = event.target.closest(".copy-code");
      if (copier) copyFrom(copier, copier.closest("figure").querySelector("code").textContent);
    });
  }

  get busy() {
    return this.abort !== null;
  }

  async send(text) {
    // An answer that failed before its first token was never a turn.
    if (this.answer?.text) this.messages.push({ role: "assistant", content: this.answer.text });
    this.answer?.tools.lastElementChild.remove(); // only the last answer can be written anew
    this.answer = null;
    this.messages.push({ role: "user", content: text });
    const view = articleOf("prompt", "You");
    const body = make("div", "body", text);
    body.dir = "auto";
    view.append(body);
    this.list.append(make("li", "", view));
    await this.generate();
  }

  async regenerate() {
    if (this.busy || !this.messages.length) return;
    this.answer?.view.parentElement.remove();
    await this.generate();
  }

  async generate() {
    const abort = (this.abort = new AbortController());
    const answer = (this.answer = new Answer({ onRegenerate: () => this.regenerate() }));
    this.list.append(make("li", "", answer.view));
    this.follow(true);
    this.onBusy(true);
    const system = this.settings.values.system.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    const body = { model: await this.model(), messages, ...this.settings.sampling() };
    await answer.run(body, abort.signal, () => this.follow(false));
    if (this.abort !== abort) return; // the conversation was cleared meanwhile
    this.abort = null;
    this.onBusy(false);
    if (answer.error?.status === 401) this.onLocked();
    else if (!answer.error) this.say(answer.text || "The answer is empty.");
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.abort = null;
    this.answer = null;
    this.messages = [];
    this.list.replaceChildren();
    this.onBusy(false);
  }

  // Scrolls along while the reader is at the end, and leaves a reader alone who has scrolled back.
  follow(always) {
    const box = this.scroller;
    const gap = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (always || gap < NEAR_END_PX) box.scrollTop = box.scrollHeight;
  }
}

function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function articleOf(className, who) {
  const made = make("article", className, make("h2", "who", who));
  made.setAttribute("aria-label", who);
  return made;
}

function button(label, act) {
  const made = make("button", "quiet", label);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

async function copyFrom(copier, text) {
  copier.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (copier.textContent = "Copy"), 1500);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard API exists only on https and localhost
  }
}

function copyBySelection(text) {
  const field = make("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
