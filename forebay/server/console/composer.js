// The box in which a message is written: text, files of text, pictures, and the message that waits for the answer to end.

import { iconButton } from "./controls.js";
import { make } from "./nodes.js";
import { fileLabel } from "./parts.js";
import { isPicture, pictureOf, pictureView } from "./pictures.js";

const DRAFT = "forebay.draft";
const MAX_FILE = 1 << 20; // bytes
const LONG_PASTE = 8000; // characters; more becomes a file

export class Composer {
  // `onSend(text, files)`: a file has `text`, or is a picture with `url`. `say(text)` tells of a file that is neither.
  // `known()` resolves once the model is known, of which `takePictures` says whether it takes any.
  constructor({ form, box, files, waiting, picker, onSend, say, known }) {
    Object.assign(this, { form, box, view: files, waiting, picker, onSend, say, known });
    this.files = [];
    this.reading = Promise.resolve(); // of files, one after the other: a photo takes much memory
    this.takesPictures = false;
    this.next = null; // what is sent when the answer has ended
    this.busy = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    box.addEventListener("keydown", (event) => {
      // An input method's Enter takes a candidate; it does not send.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    box.addEventListener("input", () => this.typed());
    box.addEventListener("paste", (event) => this.pasted(event));
    picker.addEventListener("change", () => {
      this.add(picker.files);
      picker.value = "";
    });
    this.fill(new URLSearchParams(location.search).get("q") ?? sessionStorage.getItem(DRAFT) ?? "");
    if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  }

  // Files may be dropped anywhere in `place`.
  takeDrops(place) {
    const over = (is) => place.classList.toggle("dropping", is);
    place.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      over(true);
    });
    place.addEventListener("dragleave", (event) => place.contains(event.relatedTarget) || over(false));
    place.addEventListener("drop", (event) => {
      over(false);
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  takePictures(takes) {
    this.takesPictures = takes;
    const label = takes ? "Add pictures or files of text" : "Add files of text";
    this.picker.setAttribute("aria-label", label);
    this.picker.closest("label").title = label;
  }

  fill(text) {
    this.box.value = text;
    this.typed();
  }

  typed() {
    const { box } = this;
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
    if (box.value) sessionStorage.setItem(DRAFT, box.value);
    else sessionStorage.removeItem(DRAFT);
    this.form.classList.toggle("empty", !box.value.trim() && !this.files.length);
  }

  pasted(event) {
    const { files, types } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    const isRich = text && types.includes("text/html"); // an office program adds a picture of its text
    if (files.length && !isRich) this.add(files);
    else if (text.length > LONG_PASTE) this.show([...this.files, { name: "Pasted text", text }]);
    else return;
    event.preventDefault();
  }

  add(files) {
    const all = [...files]; // the list itself is emptied
    this.reading = this.reading.then(() => this.read(all));
  }

  async read(files) {
    const read = [];
    for (const file of files) read.push(await (isPicture(file) ? this.picture(file) : textOf(file)));
    const wrong = read.filter((each) => typeof each === "string");
    this.show([...this.files, ...read.filter((each) => typeof each !== "string")]);
    if (wrong.length) this.say(wrong.join(" "));
    this.box.focus();
  }

  async picture(file) {
    await this.known();
    return this.takesPictures ? pictureOf(file) : `${file.name} is left out: this model takes no pictures.`;
  }

  show(files) {
    this.files = files;
    this.view.replaceChildren(
      ...files.map((file) => {
        const drop = iconButton("close", `Remove ${file.name}`, () => {
          this.show(this.files.filter((each) => each !== file));
          this.box.focus();
        });
        return make("li", "", file.url ? pictureView(file) : make("span", "", fileLabel(file.name, file.text)), drop);
      }),
    );
    this.typed();
  }

  async submit() {
    await this.reading; // what was dropped goes with it
    const text = this.box.value.trim();
    const { files } = this;
    if (!text && !files.length) return;
    this.show([]);
    this.fill("");
    if (!this.busy) this.onSend(text, files);
    else this.wait({ text: [this.next?.text, text].filter(Boolean).join("\n\n"), files: [...(this.next?.files ?? []), ...files] });
  }

  wait(next) {
    this.next = next;
    this.waiting.hidden = !next;
    if (!next) return;
    const back = iconButton("edit", "Edit the waiting message", () => this.takeBack());
    const text = make("span", "", next.text || next.files.map(({ name }) => name).join(", "));
    this.waiting.replaceChildren(make("b", "", "Next"), text, back);
  }

  takeBack() {
    const { text, files } = this.next;
    this.wait(null);
    this.show([...files, ...this.files]);
    this.fill([text, this.box.value].filter(Boolean).join("\n\n"));
    this.box.focus();
  }

  // `completed`: the answer ended by itself; then what waits is sent, else it is back in the box.
  setBusy(busy, completed) {
    this.busy = busy;
    if (busy || !this.next) return;
    if (!completed) {
      this.takeBack();
      return;
    }
    const { text, files } = this.next;
    this.wait(null);
    this.onSend(text, files);
  }
}

// The file, or what is wrong with it.
async function textOf(file) {
  if (file.size > MAX_FILE) return `${file.name} is larger than 1 MiB.`;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? `${file.name} is no text.` : { name: file.name, text };
  } catch {
    return `${file.name} is no text.`;
  }
}
