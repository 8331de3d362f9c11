// What the user may choose: for a conversation, for new ones, and for the page. Values are checked when they are read:
// storage is input too.

import { NUMBERS } from "./sampling.js"; // the server makes it of its own declarations

const STORE = "forebay.settings";

// What is "" is left to the server: the model's own values, or none.
export const OPTIONS = Object.freeze({
  system: "", tools: "", schema: "", model: "", ...Object.fromEntries(NUMBERS.map(({ name }) => [name, ""])), seed: "", min_tokens: "", max_tokens: "", stop: "",
});
const text = (value) => typeof value === "string";
const number = (low, high) => (value) => value === "" || (Number.isFinite(value) && value >= low && value <= high);
const integer = (low, high) => (value) => value === "" || (Number.isSafeInteger(value) && value >= low && value <= high);
const json = (fits) => (value) => text(value) && (value.trim() === "" || fits(parsed(value)));
const CHECKS = {
  system: text,
  tools: json(Array.isArray),
  schema: json((value) => value !== null && typeof value === "object" && !Array.isArray(value)),
  model: text,
  ...Object.fromEntries(NUMBERS.map(({ name, whole, low, high }) => [name, (whole ? integer : number)(low, high)])),
  seed: integer(0, Number.MAX_SAFE_INTEGER),
  min_tokens: integer(0, 2 ** 31 - 1),
  max_tokens: integer(1, 2 ** 31 - 1),
  stop: text,
};
const WRONG = { tools: "This is no JSON list.", schema: "This is no JSON object." };
const THEMES = ["system", "light", "dark"];

export class Options {
  // `onChange(options)`: those of the conversation that is open.
  constructor(dialog, form, { onChange }) {
    Object.assign(this, { dialog, form, onChange });
    form.querySelector("#sampling").prepend(...NUMBERS.flatMap(control));
    this.kept = stored();
    this.values = this.defaults();
    form.addEventListener("input", () => this.read());
    form.querySelector("#reset-settings").addEventListener("click", () => this.change({ ...OPTIONS }));
    form.querySelector("#keep-settings").addEventListener("click", () => this.save({ options: { ...this.values } }));
    document.querySelector("#open-settings").addEventListener("click", () => dialog.showModal());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    // Esc closes even where a field is wrong: show what is in force the next time.
    dialog.addEventListener("close", () => this.show(this.values));
    this.applyTheme();
  }

  // Those of a new conversation.
  defaults() {
    return { ...OPTIONS, ...this.kept.options };
  }

  // The fields of a request for a chat completion.
  request(options) {
    const { system, tools, schema, model, stop, ...sampler } = sound(options);
    const given = Object.entries(sampler).filter(([, value]) => value !== "");
    const stops = stop.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
    return {
      ...Object.fromEntries(given),
      ...(stops.length ? { stop: stops } : {}),
      ...(parsed(tools)?.length ? { tools: parsed(tools) } : {}),
      ...(parsed(schema)
        ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } } }
        : {}),
    };
  }

  read() {
    const values = { ...this.values };
    for (const [name, valid] of Object.entries(CHECKS)) {
      const field = this.form.elements[name];
      const value = field.type === "number" && field.value !== "" ? field.valueAsNumber : field.value;
      field.setCustomValidity(WRONG[name] && !valid(value) ? WRONG[name] : "");
      if (field.checkValidity() && valid(value)) values[name] = value;
    }
    if (this.form.elements.theme.value !== this.kept.theme) this.save({ theme: this.form.elements.theme.value });
    if (JSON.stringify(values) === JSON.stringify(this.values)) return;
    this.values = values;
    this.onChange(values);
  }

  change(values) {
    this.show(values);
    this.onChange(this.values);
  }

  show(values) {
    this.values = sound(values);
    for (const name of Object.keys(OPTIONS)) this.form.elements[name].value = this.values[name];
    this.form.elements.theme.value = this.kept.theme;
  }

  // What the server says it does where nothing is chosen, and the models there are.
  showServer({ sampling, models }) {
    for (const [name, value] of Object.entries(sampling ?? {}))
      if (this.form.elements[name]?.type === "number") this.form.elements[name].placeholder = String(value);
    if (sampling?.source) document.querySelector("#sampling-source").textContent = `Where a field is empty: ${sampling.source}.`;
    const choice = this.form.elements.model;
    choice.replaceChildren(...models.map((id, place) => new Option(id, place ? id : "")));
    choice.value = this.values.model;
    document.querySelector("#model-row").hidden = models.length < 2;
  }

  save(changes) {
    this.kept = { ...this.kept, ...changes };
    localStorage.setItem(STORE, JSON.stringify(this.kept));
    this.applyTheme();
  }

  applyTheme() {
    document.documentElement.dataset.theme = this.kept.theme;
  }
}

// The label and the field of a number.
function control({ name, label, hint, whole, low, high, placeholder }) {
  const labels = Object.assign(document.createElement("label"), { htmlFor: name });
  labels.append(`${label} `, Object.assign(document.createElement("small"), { textContent: hint }));
  const inputMode = low < 0 ? "text" : "decimal"; // some keyboards for numbers have no minus
  const limits = { min: low, max: high, step: whole ? 1 : "any" };
  return [labels, Object.assign(document.createElement("input"), { id: name, name, type: "number", inputMode, placeholder, ...limits })];
}

function parsed(source) {
  try {
    return JSON.parse(source);
  } catch {
    return null;
  }
}

// Those of `values` that are options and good ones; the others' defaults.
export function sound(values) {
  const good = Object.entries(CHECKS).filter(([name, valid]) => Object.hasOwn(values ?? {}, name) && valid(values[name]));
  return { ...OPTIONS, ...Object.fromEntries(good.map(([name]) => [name, values[name]])) };
}

function stored() {
  const kept = parsed(localStorage.getItem(STORE)) ?? {}; // damaged or not ours: the defaults hold
  return { options: sound(kept.options), theme: THEMES.includes(kept.theme) ? kept.theme : "system" };
}
