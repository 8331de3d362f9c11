// What an answer has besides its text: thinking, folded, and calls of tools with fields for their results.

import { seconds, size } from "./format.js";
import { button, make } from "./nodes.js";

export class Thinking {
  constructor() {
    this.summary = make("summary", "", "Thinking");
    this.body = make("div", "");
    this.view = make("details", "thought", this.summary, this.body);
    this.view.hidden = true;
  }

  draw({ thought, thought_ms: ms, content }, live) {
    this.view.hidden = !thought;
    if (!thought) return;
    const shown = this.body.firstChild ?? this.body.appendChild(document.createTextNode(""));
    shown.appendData(thought.slice(shown.length));
    const over = !live || content;
    this.summary.textContent = !over ? "Thinking" : ms ? `Thought for ${seconds(ms)}` : "Thought";
  }
}

export class Calls {
  constructor() {
    this.view = make("div", "calls");
    this.list = make("ol", "");
    this.view.append(this.list);
  }

  draw({ calls = [] }) {
    for (const [place, { name, arguments: text }] of calls.entries()) {
      const item = this.list.children[place] ?? this.list.appendChild(callItem(name));
      item.querySelector("code").textContent = text;
    }
  }

  // Asks for a result of each call; `onResults` gets them as `{ id, name, content }`.
  ask(calls, onResults) {
    if (this.sender) return;
    const fields = calls.map(({ name }, place) => {
      const field = make("textarea", "");
      field.rows = 2;
      field.placeholder = "Result";
      field.setAttribute("aria-label", `Result of ${name}`);
      this.list.children[place].append(field);
      return field;
    });
    this.sender = button("Send results", () => {
      const results = calls.map(({ id, name }, place) => ({ id, name, content: fields[place].value }));
      this.close();
      onResults(results);
    });
    this.sender.classList.remove("quiet");
    this.view.append(this.sender);
  }

  close() {
    this.sender?.remove();
    this.sender = null;
    for (const field of this.list.querySelectorAll("textarea")) field.remove();
  }
}

function callItem(name) {
  const item = make("li", "", make("h3", "", name), make("pre", "", make("code", "")));
  item.setAttribute("aria-label", `Call of ${name}`);
  return item;
}

// Files that came with a message, folded.
export function fileView({ name, text }) {
  return make("details", "file", make("summary", "", fileLabel(name, text)), make("pre", "", text));
}

export const fileLabel = (name, text) => `${name} · ${size(new Blob([text]).size)}`;
