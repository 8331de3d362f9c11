// What the server runs with and why, to be searched. Loaded when it is first opened.

import { getJson } from "./api.js";
import { make } from "./nodes.js";

export class Effective {
  constructor(field, list, note) {
    Object.assign(this, { field, list, note, rows: [] });
    field.addEventListener("input", () => this.filter());
    this.load();
  }

  async load() {
    try {
      const { settings = [], engine } = await getJson("server_info");
      const told = (engine?.report ?? []).map(({ item, value, reason }) => ({ name: item, value, reason, source: "engine" }));
      this.rows = [...settings, ...told].map(rowOf);
      this.list.replaceChildren(...this.rows.map(({ view }) => view));
      this.filter();
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  filter() {
    const wanted = this.field.value.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    for (const { view, text } of this.rows) {
      view.hidden = !wanted.every((word) => text.includes(word));
      shown += !view.hidden;
    }
    this.note.textContent = shown === this.rows.length ? "" : `${shown} of ${this.rows.length}`;
  }
}

function rowOf({ name, value, source, reason }) {
  const said = name.replaceAll("_", " ");
  const view = make("div", "", make("dt", "", said), make("dd", "", make("b", "", value || "–"), make("span", "", reason)));
  view.classList.toggle("chosen", ["flag", "env", "file"].includes(source));
  return { view, text: `${name} ${said} ${value} ${source} ${reason}`.toLowerCase() };
}
