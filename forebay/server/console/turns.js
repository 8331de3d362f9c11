// The messages of a conversation as nodes.

import { copyButton, iconButton } from "./controls.js";
import { statsLine } from "./format.js";
import { button, make } from "./nodes.js";
import { Calls, Thinking, fileView } from "./parts.js";
import { pictureView } from "./pictures.js";

const SHARE = 3; // a draw that took a while is followed by so many times that while without one

let loading;
const markdown = () => (loading ??= import("./markdown.js"));

// Each view has `item`, the list's, and `versions(all)`, which says which version of how many it is.
class Turn {
  // `actions`: edit(message, text), regenerate(message), remove(message), show(message, step), returned(message, results).
  constructor(message, className, who, actions) {
    Object.assign(this, { message, actions });
    this.view = make("article", className, make("h2", "who", who));
    this.view.setAttribute("aria-label", who);
    this.tools = make("div", "tools");
    this.tools.setAttribute("role", "group");
    this.tools.setAttribute("aria-label", "Actions");
    this.switcher = make("span", "switcher");
    this.item = make("li", "", this.view);
  }

  versions(all) {
    const place = all.findIndex(({ id }) => id === this.message.id);
    const go = (step) => () => this.actions.show(all[place + step], step);
    const back = iconButton("left", "Earlier version", go(-1));
    const on = iconButton("right", "Later version", go(1));
    back.disabled = place === 0;
    on.disabled = place === all.length - 1;
    const count = make("span", "", `${place + 1}/${all.length}`);
    count.setAttribute("aria-label", `Version ${place + 1} of ${all.length}`);
    count.setAttribute("role", "img");
    this.switcher.replaceChildren(back, count, on);
    this.switcher.hidden = all.length < 2;
  }

  // The arrow that goes on in the same direction, or where there is none the one back.
  focusVersions(step) {
    const arrows = [...this.switcher.querySelectorAll("button:enabled")];
    arrows.at(step < 0 ? 0 : -1)?.focus();
  }
}

export class PromptTurn extends Turn {
  constructor(message, actions) {
    super(message, "prompt", "You", actions);
    this.body = make("div", "body");
    this.show();
    this.tools.append(
      this.switcher,
      copyButton("Copy message", () => message.content),
      iconButton("edit", "Edit message", () => this.edit()),
      iconButton("trash", "Delete message", () => actions.remove(message)),
    );
    this.view.append(this.body, make("div", "foot", this.tools));
  }

  show() {
    const { content, files = [], pictures = [] } = this.message;
    const text = make("div", "", content);
    text.dir = "auto";
    this.body.replaceChildren(...pictures.map(pictureView), ...files.map(fileView), ...(content ? [text] : []));
    this.tools.hidden = false;
  }

  edit() {
    const field = make("textarea", "");
    field.value = this.message.content;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    field.setAttribute("aria-label", "Edited message");
    const form = make("form", "edit", field);
    const cancel = button("Cancel", () => this.leave());
    const send = make("button", "", "Send");
    form.append(make("div", "row end", cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.leave();
      this.actions.edit(this.message, field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceChildren(form);
    this.tools.hidden = true;
    field.focus();
  }

  leave() {
    this.show();
    this.tools.querySelector("[aria-label='Edit message']").focus();
  }
}

export class AnswerTurn extends Turn {
  constructor(message, actions) {
    super(message, "answer", "Answer", actions);
    this.thinking = new Thinking();
    this.calls = new Calls();
    this.frame = 0;
    this.rested = 0;
    this.body = make("div", "body");
    this.body.setAttribute("aria-busy", "false");
    this.note = make("p", "error");
    this.note.setAttribute("role", "alert");
    this.note.hidden = true;
    this.stats = make("p", "stats");
    this.tools.append(
      this.switcher,
      copyButton("Copy answer", () => message.content),
      iconButton("redo", "Regenerate", () => actions.regenerate(message)),
      iconButton("trash", "Delete answer", () => actions.remove(message)),
    );
    this.why = make("details", "why", make("summary", "", "Explain"), make("ul", ""));
    this.why.addEventListener("toggle", () => this.why.open && this.explain());
    const foot = make("div", "foot", this.stats, this.tools);
    this.view.append(this.thinking.view, this.body, this.calls.view, this.note, foot, this.why);
    markdown().then(
      ({ Markdown }) => {
        this.text = new Markdown(this.body);
        this.draw(this.live);
      },
      () => {}, // the text stays plain
    );
  }

  // At most once per frame, and less often where a draw takes long.
  drawSoon() {
    if (this.frame) return;
    const step = (now) => {
      if (now < this.rested) {
        this.frame = requestAnimationFrame(step);
        return;
      }
      this.frame = 0;
      const start = performance.now();
      this.draw(true);
      const end = performance.now();
      this.rested = end + (end - start) * SHARE;
    };
    this.frame = requestAnimationFrame(step);
  }

  draw(live = false) {
    if (!live) cancelAnimationFrame(this.frame);
    const { message } = this;
    this.live = live;
    if (this.text) this.text.update(message.content, !live);
    else this.body.textContent = message.content;
    this.thinking.draw(message, live);
    this.calls.draw(message);
    this.body.setAttribute("aria-busy", String(live));
    this.tools.hidden = live;
    this.note.hidden = live || !message.error;
    this.note.textContent = message.error ?? "";
    this.stats.textContent = live ? "" : statsLine(message);
    this.why.hidden = live || !message.request;
  }

  async explain() {
    let lines;
    try {
      lines = await (await import("./why.js")).explain(this.message.request);
    } catch (error) {
      lines = [error.message];
    }
    this.why.lastElementChild.replaceChildren(...lines.map((line) => make("li", "", line)));
  }

  // The last answer's calls wait for results.
  ask(last) {
    const { message } = this;
    if (last && message.finish === "tool_calls") this.calls.ask(message.calls, (got) => this.actions.returned(message, got));
    else this.calls.close();
  }
}

export class ResultsTurn extends Turn {
  constructor(message, actions) {
    super(message, "results", "Results", actions);
    this.tools.append(this.switcher, iconButton("trash", "Delete results", () => actions.remove(message)));
    const shown = message.results.map(({ name, content }) => make("li", "", make("h3", "", name), make("pre", "", content)));
    this.view.append(make("ol", "calls", ...shown), make("div", "foot", this.tools));
  }
}

export const TURNS = { user: PromptTurn, assistant: AnswerTurn, tool: ResultsTurn };
