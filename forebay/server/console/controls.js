// Buttons with pictures, and the note at the bottom that can take an action back.

import { copyText, make } from "./nodes.js";

const SVG = "http://www.w3.org/2000/svg";
const DONE_MS = 1500;

export function icon(name) {
  const picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("class", "icon");
  picture.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  picture.append(use);
  return picture;
}

export function iconButton(name, label, act) {
  const made = make("button", "quiet picture", icon(name));
  made.type = "button";
  made.title = label;
  made.setAttribute("aria-label", label);
  made.addEventListener("click", () => act(made));
  return made;
}

// Copies what `text()` is at the click; the button says for a moment whether it did.
export function copyButton(label, text) {
  return iconButton("copy", label, async (self) => {
    const done = await copyText(text());
    self.replaceChildren(icon(done ? "check" : "close"));
    self.setAttribute("aria-label", done ? "Copied" : "Not allowed");
    setTimeout(() => {
      self.replaceChildren(icon("copy"));
      self.setAttribute("aria-label", label);
    }, DONE_MS);
  });
}

// One at a time; it stays until it is used, dismissed, or something else happens.
export class Toast {
  // `leave()` takes the focus where it was on the note's buttons.
  constructor(view, leave) {
    Object.assign(this, { view, leave });
    [this.text, this.undo, this.close] = view.children;
    this.undo.addEventListener("click", () => this.end(this.onUndo));
    this.close.addEventListener("click", () => this.end(this.onEnd));
  }

  // `onUndo` is called for Undo, `onEnd` where it is too late for that; without `onUndo` the note only says something.
  show(text, onUndo = null, onEnd = null) {
    this.end(this.onEnd);
    Object.assign(this, { onUndo, onEnd });
    this.text.textContent = text;
    this.undo.hidden = !onUndo;
    this.view.hidden = false;
  }

  end(act = this.onEnd) {
    this.onUndo = this.onEnd = null;
    if (this.view.contains(document.activeElement)) this.leave();
    this.view.hidden = true;
    act?.();
  }
}

export function download(name, type, text) {
  const link = make("a", "");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}
