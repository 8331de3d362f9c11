// What the user may choose, kept in this browser. Values are checked when read: storage is input too.

const STORE = "forebay.settings";

// Without a temperature or top-p the server takes the model's own.
export const DEFAULTS = Object.freeze({
  system: "",
  tools: "",
  temperature: "",
  top_p: "",
  max_tokens: 512,
  seed: "",
  theme: "system",
});

const CHECKS = {
  system: (value) => typeof value === "string",
  tools: (value) => value.trim() === "" || Array.isArray(parsed(value)),
  temperature: (value) => value === "" || (value >= 0 && value <= 2),
  top_p: (value) => value === "" || (value > 0 && value <= 1),
  max_tokens: (value) => Number.isInteger(value) && value >= 1,
  seed: (value) => value === "" || (Number.isSafeInteger(value) && value >= 0),
  theme: (value) => ["system", "light", "dark"].includes(value),
};

export class Settings {
  constructor(dialog, form) {
    this.form = form;
    this.values = stored();
    this.show();
    form.addEventListener("input", () => this.read());
    form.querySelector("#reset-settings").addEventListener("click", () => {
      this.values = { ...DEFAULTS };
      this.show();
      this.save();
    });
    document.querySelector("#open-settings").addEventListener("click", () => dialog.showModal());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    // Esc closes even where a field is wrong: show what is in force the next time.
    dialog.addEventListener("close", () => this.show());
  }

  // The request fields of a chat completion.
  request() {
    const { temperature, top_p, max_tokens, seed, tools } = this.values;
    const given = Object.entries({ temperature, top_p, max_tokens, seed }).filter(([, value]) => value !== "");
    const offered = parsed(tools) ?? [];
    return { ...Object.fromEntries(given), ...(offered.length ? { tools: offered } : {}) };
  }

  read() {
    for (const [name, valid] of Object.entries(CHECKS)) {
      const field = this.form.elements[name];
      const value = field.type === "number" && field.value !== "" ? field.valueAsNumber : field.value;
      field.setCustomValidity?.(name === "tools" && !valid(value) ? "This is no JSON list." : "");
      if (field.checkValidity() && valid(value)) this.values[name] = value;
    }
    this.save();
  }

  save() {
    localStorage.setItem(STORE, JSON.stringify(this.values));
    this.applyTheme();
  }

  show() {
    for (const name of Object.keys(CHECKS)) this.form.elements[name].value = this.values[name];
    this.applyTheme();
  }

  applyTheme() {
    document.documentElement.dataset.theme = this.values.theme;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function stored() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    // Not ours, or damaged: the defaults hold.
  }
  const good = Object.entries(CHECKS).filter(([name, valid]) => name in kept && valid(kept[name]));
  return { ...DEFAULTS, ...Object.fromEntries(good.map(([name]) => [name, kept[name]])) };
}
