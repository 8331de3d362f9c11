// The conversation: what was said, and the nodes that show it.

import { streamChat } from "./api.js";
import { statsLine } from "./format.js";
import { render } from "./markdown.js";
import { button, copyFrom, make } from "./nodes.js";
import { Calls, Thinking } from "./parts.js";

const NEAR_END_PX = 80;

// One answer being written: its text, its timing, and its article.
class Answer {
  constructor({ onRegenerate, onResults }) {
    this.text = "";
    this.thinking = new Thinking();
    this.calls = new Calls();
    this.onResults = onResults;
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
    this.view.append(this.thinking.view, this.body, this.calls.view, this.note, make("div", "foot", this.stats, this.tools));
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
        if (this.take(choice.delta ?? {})) {
          lastAt = performance.now();
          this.firstAt ??= lastAt;
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

  // Whether there was anything in it.
  take({ content, reasoning_content: thought, tool_calls: calls }) {
    if (content) this.text += content;
    if (thought) this.thinking.add(thought);
    if (calls) this.calls.add(calls);
    return Boolean(content || thought || calls);
  }

  // At most once per frame, however fast the tokens come.
  draw(after) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.show();
      after();
    });
  }

  show() {
    render(this.body, this.text);
    this.thinking.draw();
    this.calls.draw();
  }

  end(start, lastAt) {
    cancelAnimationFrame(this.frame);
    this.show();
    this.thinking.end();
    if (this.finish === "tool_calls") this.calls.ask(this.onResults);
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
  // `settings` has `values.system` and `request()`; `onBusy(bool)`, `onLocked()` and `say(text)` are the page's.
  constructor({ list, scroller, settings, model, onBusy, onLocked, say }) {
    Object.assign(this, { list, scroller, settings, model, onBusy, onLocked, say });
    this.messages = [];
    this.usages = [];
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
    // An answer that failed before its first token was never a turn, and calls without their results are none.
    if (this.answer?.text) this.messages.push({ role: "assistant", content: this.answer.text });
    this.leave();
    this.messages.push({ role: "user", content: text });
    const view = articleOf("prompt", "You");
    const body = make("div", "body", text);
    body.dir = "auto";
    view.append(body);
    this.list.append(make("li", "", view));
    await this.generate();
  }

  // Goes on from the calls of the last answer, with what the user says that they returned.
  async returned() {
    const { text, thinking, calls } = this.answer;
    const thought = thinking.text ? { reasoning_content: thinking.text } : {};
    this.messages.push({ role: "assistant", content: text || null, tool_calls: calls.asked, ...thought }, ...calls.results);
    this.leave();
    await this.generate();
  }

  // The last answer stays as it is: only the last one can be written anew, or gets results.
  leave() {
    this.answer?.tools.lastElementChild.remove();
    this.answer?.calls.close();
    this.answer = null;
  }

  async regenerate() {
    if (this.busy || !this.messages.length) return;
    this.answer?.view.parentElement.remove();
    this.usages.pop();
    await this.generate();
  }

  async generate() {
    const abort = (this.abort = new AbortController());
    const answer = (this.answer = new Answer({
      onRegenerate: () => this.regenerate(),
      onResults: () => this.returned(),
    }));
    this.list.append(make("li", "", answer.view));
    this.follow(true);
    this.onBusy(true);
    const system = this.settings.values.system.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    const body = { model: await this.model(), messages, ...this.settings.request() };
    await answer.run(body, abort.signal, () => this.follow(false));
    if (this.abort !== abort) return; // the conversation was cleared meanwhile
    this.abort = null;
    this.told([...this.usages, answer.usage]);
    this.onBusy(false);
    if (answer.error?.status === 401) this.onLocked();
    else if (!answer.error) this.say(answer.text || (answer.calls.list.length ? "The model calls tools." : "The answer is empty."));
  }

  // The strip draws what each answer of the conversation took.
  told(usages) {
    this.usages = usages;
    document.dispatchEvent(new CustomEvent("forebay:conversation", { detail: usages }));
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
    this.told([]);
    this.onBusy(false);
  }

  // Scrolls along while the reader is at the end, and leaves a reader alone who has scrolled back.
  follow(always) {
    const box = this.scroller;
    const gap = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (always || gap < NEAR_END_PX) box.scrollTop = box.scrollHeight;
  }
}

function articleOf(className, who) {
  const made = make("article", className, make("h2", "who", who));
  made.setAttribute("aria-label", who);
  return made;
}
