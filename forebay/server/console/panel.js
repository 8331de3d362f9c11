// The conversations kept in this browser: list, search, rename, delete, export and import.

import { download, iconButton } from "./controls.js";
import { make } from "./nodes.js";

const $ = (id) => document.getElementById(id);
const TIME = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
const DATE = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", year: "numeric" });

export class Panel {
  // `onGone(id)`: a conversation was deleted; `onBack(id)`: it is there again; `onNamed(conversation)`: another name for it;
  // `onJoined(id)`: messages of a file are among its own.
  constructor({ store, toast, onGone, onBack, onNamed, onJoined }) {
    Object.assign(this, { store, toast, onGone, onBack, onNamed, onJoined });
    this.current = null;
    this.found = null; // of a search: the ids with the text in them
    this.chosen = null; // whose menu is open
    this.list = $("chats");
    $("search").addEventListener("input", () => this.search());
    $("export-all").addEventListener("click", () => this.export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", (event) => this.import(event.target));
    for (const [id, act] of [
      ["rename", () => this.rename(this.chosen)],
      ["export-json", () => this.export(this.chosen)],
      ["export-markdown", () => this.export(this.chosen, true)],
      ["delete", () => this.delete(this.chosen)],
    ])
      $(id).addEventListener("click", () => {
        $("chat-menu").hidePopover();
        act();
      });
  }

  async draw() {
    const all = (await this.store.all()).filter(({ deleted }) => !deleted).sort((a, b) => b.updated - a.updated);
    const wanted = $("search").value.trim().toLowerCase();
    const shown = wanted ? all.filter(({ id, title }) => title.toLowerCase().includes(wanted) || this.found?.has(id)) : all;
    if (this.list.querySelector("input")) return; // a name is being typed: the list waits for it
    const focused = document.activeElement.closest?.("#chats a")?.hash;
    this.list.replaceChildren(...shown.map((conversation) => this.itemOf(conversation)));
    if (focused) this.list.querySelector(`a[href="${focused}"]`)?.focus();
    $("chats-note").textContent = shown.length ? "" : wanted ? "Nothing found." : "Chats are kept here, in this browser only.";
    $("export-all").disabled = !all.length;
  }

  itemOf(conversation) {
    const { id, title, updated } = conversation;
    const time = make("time", "", when(updated));
    time.dateTime = new Date(updated).toISOString();
    const name = make("span", "title", title);
    name.dir = "auto";
    const link = make("a", "", name, time);
    link.href = `#c=${id}`;
    link.title = title;
    if (id === this.current) link.setAttribute("aria-current", "page");
    const menu = iconButton("dots", `Actions for ${title}`, () => {
      this.chosen = conversation;
      const box = $("chat-menu");
      const { left, bottom } = menu.getBoundingClientRect();
      box.showPopover();
      box.style.left = `${Math.max(4, Math.min(left, innerWidth - box.offsetWidth - 4))}px`;
      box.style.top = `${Math.min(bottom + 2, innerHeight - box.offsetHeight - 4)}px`;
      box.querySelector("button").focus();
    });
    menu.setAttribute("aria-haspopup", "dialog");
    const item = make("li", "", link, menu);
    item.dataset.id = id;
    return item;
  }

  show(conversation) {
    this.current = conversation.id;
    return this.draw();
  }

  async search() {
    const wanted = $("search").value.trim();
    const found = (this.found = new Set());
    await this.draw();
    if (!wanted) return;
    for await (const id of this.store.search(wanted)) {
      if (this.found !== found) return; // another search began
      found.add(id);
    }
    await this.draw();
  }

  rename(conversation) {
    const item = this.list.querySelector(`[data-id="${conversation.id}"]`);
    const field = make("input", "");
    field.value = conversation.title;
    field.setAttribute("aria-label", "Name of the chat");
    let left = false; // removing a field that has the focus blurs it
    const leave = async (title) => {
      if (left) return;
      left = true;
      field.remove();
      if (title && title !== conversation.title) {
        await this.store.patch(conversation, { title });
        this.onNamed(conversation);
      }
      await this.draw();
      this.list.querySelector(`[data-id="${conversation.id}"] a`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(field.value.trim());
      else if (event.key === "Escape") leave("");
      else return;
      event.stopPropagation();
      event.preventDefault();
    });
    field.addEventListener("blur", () => leave(field.value.trim()));
    item.replaceChildren(field);
    field.select();
  }

  async delete(conversation) {
    const { id, title } = conversation;
    const place = [...this.list.children].findIndex((item) => item.dataset.id === id);
    await this.store.patch(conversation, { deleted: Date.now() });
    const back = async () => {
      await this.store.patch(conversation, { deleted: 0 });
      await this.draw();
      this.onBack(id);
    };
    this.onGone(id);
    this.toast.show(`Deleted “${title}”.`, back, () => this.store.purge(id));
    await this.draw();
    const next = this.list.children[place] ?? this.list.lastElementChild;
    if (document.activeElement === document.body) (next?.querySelector("a") ?? $("search")).focus();
  }

  async export(only = null, asMarkdown = false) {
    const transfer = await import("./transfer.js");
    const all = (await this.store.all()).filter(({ deleted }) => !deleted);
    const conversations = only ? all.filter(({ id }) => id === only.id) : all;
    const whole = await Promise.all(conversations.map(async (each) => ({ ...each, messages: await this.store.messages(each.id) })));
    const name = only ? transfer.fileName(only.title) : "forebay-chats";
    if (asMarkdown) download(`${name}.md`, "text/markdown", transfer.toMarkdown(whole[0]));
    else download(`${name}.json`, "application/json", transfer.toJson(whole));
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    const transfer = await import("./transfer.js");
    try {
      const conversations = transfer.fromJson(await file.text());
      for (const { messages, ...conversation } of conversations) {
        await this.store.patch(conversation, { deleted: 0 }); // first: what is there is not purged
        await this.store.add(messages);
        this.onJoined(conversation.id);
      }
      this.toast.show(`Imported ${conversations.length} ${conversations.length === 1 ? "chat" : "chats"}.`);
    } catch (error) {
      this.toast.show(`${file.name}: ${error.message}`);
    }
    await this.draw();
  }
}

function when(ms) {
  const then = new Date(ms);
  const now = new Date();
  const days = (new Date(now).setHours(0, 0, 0, 0) - new Date(ms).setHours(0, 0, 0, 0)) / 86400000;
  if (days < 1) return TIME.format(then);
  if (days < 2) return "yesterday";
  return (then.getFullYear() === now.getFullYear() ? DAY : DATE).format(then);
}
