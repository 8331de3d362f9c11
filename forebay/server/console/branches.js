// The prefix tree: what the cache holds, branch by branch, the largest first. Loaded when it is first opened.

import { getJson, postJson, session } from "./api.js";
import { ago, plural, size, whole } from "./format.js";
import { make } from "./nodes.js";

const LOOK_MS = 3000;
const STEP = 25; // rows that are shown at first, and with each click more
const MOST = 200; // as many as one question may ask for

export class Branches {
  // `sizes`: the list of what more memory would bring; `isSeen()`: whether anybody could be looking.
  constructor(box, note, sizes, isSeen) {
    Object.assign(this, { box, note, sizes, isSeen, timer: 0 });
    this.top = new Level(this, "");
    box.replaceChildren(this.top.view);
    this.look();
  }

  // Now, and again as long as somebody looks.
  async look() {
    clearTimeout(this.timer);
    if (!this.isSeen()) return;
    try {
      const { num_nodes: nodes, num_bytes: bytes, is_cut: isCut } = await this.top.load();
      const all = `${plural(nodes, "branch", "branches")}, ${size(bytes)}`;
      this.note.textContent = nodes ? (isCut ? `The first ${all}: there is more than can be shown.` : `${all}.`) : "Nothing is cached yet.";
      const { keys } = await getJson("debug/cache/what-if");
      this.sizes.replaceChildren(...whatIf(keys).map((line) => make("li", "", line)));
    } catch (error) {
      this.note.textContent = error.message;
    }
    if (this.isSeen()) this.timer = setTimeout(() => this.look(), LOOK_MS);
  }
}

// "+8 GiB: 61 to 78 % of prompt tokens reused", over all keys that are shown.
export function whatIf(keys) {
  const total = keys.reduce((tokens, key) => tokens + key.prompt_tokens, 0);
  if (!total) return [];
  const mean = (part) => Math.round((100 * keys.reduce((tokens, key) => tokens + key.prompt_tokens * part(key), 0)) / total);
  const now = mean((key) => key.reuse);
  return keys[0].sizes.map(({ tier, more_bytes: more }, i) => {
    const where = keys[0].sizes.every((size) => size.tier === tier) ? "" : ` (${tier})`;
    return `+${size(more)}${where}: ${now} to ${mean((key) => key.sizes[i].reuse)} % of prompt tokens reused`;
  });
}

// The branches of one node: those that are shown, and a button for more of them.
class Level {
  constructor(tree, node) {
    Object.assign(this, { tree, node, limit: STEP, rows: new Map() });
    this.list = make("ol", "branches");
    this.more = make("button", "quiet");
    this.more.type = "button";
    this.more.hidden = true;
    this.more.addEventListener("click", () => {
      this.limit += this.limit < 4 * STEP ? STEP : 4 * STEP;
      this.tree.look();
    });
    this.view = make("div", "level", this.list, this.more);
  }

  async load() {
    const found = { rows: [] };
    for (let offset = 0; offset < this.limit; offset += MOST) {
      const limit = Math.min(MOST, this.limit - offset);
      const part = await postJson("debug/tree", { node: this.node, offset, limit, prompt_cache_key: session() });
      Object.assign(found, part, { rows: [...found.rows, ...part.rows] });
      if (part.rows.length < limit) break;
    }
    this.show(found);
    await Promise.all([...this.rows.values()].map((row) => row.below?.load().catch(() => row.close())));
    return found;
  }

  show({ rows, num_branches: all }) {
    const most = Math.max(1, ...rows.map((row) => row.num_bytes_below));
    const focused = document.activeElement;
    const before = this.rows;
    this.rows = new Map();
    for (const row of rows) {
      const shown = before.get(row.node) ?? new Row(this, row.node);
      shown.show(row, most);
      this.rows.set(row.node, shown);
    }
    const views = [...this.rows.values()].map((row) => row.view);
    if (views.length !== this.list.children.length || views.some((view, i) => this.list.children[i] !== view)) {
      this.list.replaceChildren(...views);
      if (this.list.contains(focused)) focused.focus();
    }
    const left = all - rows.length;
    this.more.hidden = left <= 0;
    this.more.textContent = `${whole(left)} more, smaller ones`;
  }
}

class Row {
  constructor(level, node) {
    Object.assign(this, { level, node, below: null });
    this.text = make("span", "text");
    this.size = make("span", "number");
    this.bar = make("span", "weight");
    this.marks = make("span", "marks");
    this.button = make("button", "branch", this.bar, this.text, this.marks, this.size);
    this.button.type = "button";
    this.button.setAttribute("aria-expanded", "false");
    this.button.addEventListener("click", () => (this.details.hidden ? this.open() : this.close()));
    this.facts = make("p", "caption");
    this.details = make("div", "details", this.facts);
    this.details.hidden = true;
    this.view = make("li", "", this.button, this.details);
  }

  show(row, most) {
    this.row = row;
    const name = row.text === null ? (row.num_tokens ? "another session’s" : "a cache of its own") : row.text.trim().replace(/\s+/g, " ") || "␣";
    this.text.textContent = name;
    this.text.classList.toggle("unknown", row.text === null);
    this.size.textContent = size(row.num_bytes_below);
    this.bar.style.setProperty("--share", String(row.num_bytes_below / most));
    this.bar.dataset.inUse = String(row.num_requests > 0);
    const kept = sum(row.kept_below);
    this.marks.textContent = kept ? `◆ ${whole(kept)}` : "";
    this.button.classList.toggle("parts", row.num_branches > 0);
    const facts = factsOf(row);
    this.button.title = facts;
    this.facts.textContent = row.text === null ? facts : `${row.text.trim().slice(0, 400)}\n${facts}`;
  }

  async open() {
    this.details.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    if (!this.row.num_branches) return;
    this.below = new Level(this.level.tree, this.node);
    this.details.append(this.below.view);
    await this.below.load().catch((error) => (this.facts.textContent = error.message));
  }

  close() {
    this.details.hidden = true;
    this.button.setAttribute("aria-expanded", "false");
    this.below?.view.remove();
    this.below = null;
  }
}

const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

// "1,024 tokens here, 4,096 in all in 12 branches; used 3 times, last 2 min ago; 2 states; 1 running request."
function factsOf(row) {
  const facts = [plural(row.num_tokens, "token")];
  if (row.num_below > 1) facts[0] += ` here, ${whole(row.num_tokens_below)} with the ${plural(row.num_below - 1, "branch", "branches")} below`;
  facts.push(`used ${row.num_uses === 1 ? "once" : plural(row.num_uses, "time")}, last ${ago(row.idle_s)}`);
  for (const [kind, count] of Object.entries(row.kept_below)) {
    const own = row.kept[kind];
    if (count) facts.push(`${kind === "state" ? plural(count, "state") : `${whole(count)} of ${kind}`}${own && own < count ? `, ${whole(own)} here` : ""}`);
  }
  if (row.num_requests) facts.push(`held by ${plural(row.num_requests, "running request")}`);
  return `${facts.join("; ")}.`;
}
