// The conversation that is open: its messages, the answer that is being written, and what is kept of both.

import { streamChat } from "./api.js";
import { copyFrom } from "./nodes.js";
import { Tree, newId } from "./tree.js";
import { TURNS } from "./turns.js";

const NEAR_END_PX = 80;
const KEEP_MS = 700; // between two writes of an answer that grows
const TITLE_LENGTH = 60;

export class Chat {
  // `settings` has `request(options)` and `defaults()`; `model()` is a promise of the served model's name.
  // `onBusy(bool)`, `onFailed(answer)`, `onOpen(chat)`, `say(text)` and `toast` are the page's.
  constructor({ list, scroller, store, settings, model, onBusy, onFailed, onOpen, say, toast }) {
    Object.assign(this, { list, scroller, store, settings, model, onBusy, onFailed, onOpen, say, toast });
    this.turns = new Map();
    this.abort = null;
    this.isStale = false;
    this.isAtEnd = true;
    this.top = 0; // what is scrolled away above
    // Scrolls along while the reader is at the end, and leaves a reader alone who has scrolled back. What has grown since
    // it last did is no scrolling back.
    scroller.addEventListener("scroll", () => {
      const { scrollTop: top, scrollHeight: all, clientHeight: seen } = scroller;
      this.isAtEnd = all - top - seen < NEAR_END_PX || (this.isAtEnd && top >= this.top);
      this.top = top;
    });
    new ResizeObserver(() => this.isAtEnd && this.toEnd()).observe(list);
    list.addEventListener("click", (event) => {
      const copier = event.target.closest(".copy-code");
      if (copier) copyFrom(copier, copier.closest("figure").querySelector("code").textContent);
    });
    addEventListener("pagehide", () => this.abort && this.keep(this.answer));
  }

  get busy() {
    return this.abort !== null;
  }

  get isEmpty() {
    return this.tree.byId.size === 0;
  }

  get path() {
    return this.tree.path(this.conversation.head);
  }

  // A conversation that is kept once something is said in it or set for it.
  fresh() {
    const now = Date.now();
    const options = this.settings.defaults();
    this.show({ id: newId(), title: "New chat", created: now, updated: now, head: null, deleted: 0, options }, []);
    this.saved = false;
  }

  async open(id) {
    const conversation = await this.store.conversation(id);
    if (!conversation || conversation.deleted) return false;
    this.show(conversation, await this.store.messages(id));
    this.saved = true;
    return true;
  }

  show(conversation, messages) {
    this.stop();
    this.abort = null;
    this.conversation = conversation;
    this.tree = new Tree(messages);
    conversation.head = this.tree.tip(conversation.head);
    this.turns.clear();
    this.list.replaceChildren();
    this.draw();
    this.toEnd();
    this.onBusy(false);
    this.onOpen(conversation);
  }

  // Another tab wrote to it: its messages join ours, and the version that we look at stays.
  async refresh() {
    const { id } = this.conversation;
    const conversation = await this.store.conversation(id);
    const messages = await this.store.messages(id);
    this.isStale = this.conversation.id === id && this.busy;
    if (this.conversation.id !== id || this.busy || !conversation) return;
    const { head } = this.conversation;
    Object.assign(this.conversation, conversation);
    this.tree = new Tree(messages.map((message) => this.known(message)));
    this.conversation.head = this.tree.tip(head);
    this.draw();
    this.onOpen(this.conversation);
  }

  // The message that a turn shows already, as it is now.
  known(message) {
    const turn = this.turns.get(message.id);
    if (!turn) return message;
    const changed = turn.message.content !== message.content || turn.message.finish !== message.finish;
    Object.assign(turn.message, message);
    if (changed) turn.draw?.();
    return turn.message;
  }

  async set(fields) {
    this.saved = true;
    await this.store.patch(this.conversation, fields);
  }

  // Puts the turns of the path on the page; those that stand there already stay.
  draw() {
    const path = this.path;
    const items = path.map((message) => {
      if (!this.turns.has(message.id)) this.turns.set(message.id, this.turnOf(message));
      const turn = this.turns.get(message.id);
      turn.versions(this.tree.versions(message));
      turn.ask?.(message === path.at(-1));
      return turn.item;
    });
    let same = 0;
    while (same < items.length && this.list.children[same] === items[same]) same++;
    while (this.list.children.length > same) this.list.lastElementChild.remove();
    this.list.append(...items.slice(same));
    this.tell();
  }

  // The strip draws what each answer of the conversation took; null where that is not known.
  tell() {
    const answers = this.path.filter(({ role }) => role === "assistant");
    const usages = answers.map(({ usage }) => (usage?.cache?.matched_tokens ? usage : null));
    document.dispatchEvent(new CustomEvent("forebay:conversation", { detail: usages }));
  }

  turnOf(message) {
    const turn = new TURNS[message.role](message, {
      edit: (of, text) => this.edit(of, text),
      regenerate: (of) => this.regenerate(of),
      remove: (of) => this.remove(of),
      show: (of, step) => {
        this.choose(this.tree.leaf(of.id));
        this.turns.get(of.id)?.focusVersions(step);
      },
      returned: (of, results) => this.post({ parent: of.id, role: "tool", content: "", results }),
    });
    turn.draw?.();
    return turn;
  }

  async choose(head) {
    if (this.busy) return;
    this.conversation.head = head;
    this.draw();
    this.onBusy(false);
    await this.set({ head });
  }

  // Of the files, those with a `url` are pictures.
  async send(text, attached = []) {
    const files = attached.filter(({ url }) => !url);
    const pictures = attached.filter(({ url }) => url);
    await this.ask(this.conversation.head, text, files, pictures);
  }

  async ask(parent, content, files = [], pictures = []) {
    const beside = { ...(files.length ? { files } : {}), ...(pictures.length ? { pictures } : {}) };
    await this.post({ parent, role: "user", content, ...beside });
  }

  async edit(message, text) {
    await this.ask(message.parent, text, message.files, message.pictures);
  }

  // Opens the last message of the user's for editing.
  editLast() {
    if (this.busy) return;
    const last = this.path.findLast(({ role }) => role === "user");
    if (last) this.turns.get(last.id).edit();
  }

  async regenerate(message) {
    if (!this.busy) await this.generate(message.role === "assistant" ? message.parent : message.id);
  }

  // Something of the user's, and the answer to it.
  async post(fields) {
    if (this.busy) return;
    const message = { id: newId(), conversation: this.conversation.id, ...fields };
    if (this.isEmpty && this.conversation.title === "New chat") this.conversation.title = titleOf(message);
    this.tree.add(message);
    this.conversation.head = message.id;
    const kept = this.store.write([message]);
    const { title, head } = this.conversation;
    this.set({ title, head, updated: Date.now() });
    this.onOpen(this.conversation);
    await Promise.all([this.generate(message.id), kept]);
  }

  async generate(parent) {
    const abort = (this.abort = new AbortController());
    const { conversation } = this;
    const asked = this.tree.path(parent);
    const answer = { id: newId(), conversation: conversation.id, parent, role: "assistant", content: "", finish: "" };
    this.answer = answer;
    this.tree.add(answer);
    conversation.head = answer.id;
    this.draw();
    const turn = this.turns.get(answer.id);
    turn.draw(true);
    this.toEnd();
    this.onBusy(true);
    await this.write(answer, asked, abort.signal, () => turn.drawSoon());
    await Promise.all([this.keep(answer), this.store.patch(conversation, { head: answer.id, updated: Date.now() })]);
    turn.draw();
    if (this.abort !== abort) return; // another conversation is open
    this.abort = null; // at once with the draw: an action that can be seen is never refused
    if (this.isStale) this.refresh();
    turn.ask(true);
    this.tell();
    this.onBusy(false, { completed: !answer.error && answer.finish !== "stopped" });
    if (answer.error) this.onFailed(answer);
    else this.say(answer.content || (answer.calls ? "The model calls tools." : "The answer is empty."));
  }

  // Fills `answer` with what the server sends.
  async write(answer, asked, signal, onNews) {
    const clock = new Clock(answer);
    let kept = -Infinity;
    try {
      const body = { model: await this.model(), ...this.settings.request(this.conversation.options) };
      body.model = this.conversation.options.model || body.model;
      body.messages = messagesOf(asked, this.conversation.options.system);
      for await (const chunk of streamChat(body, signal)) {
        answer.request ??= chunk.id;
        answer.usage = chunk.usage ?? answer.usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        answer.finish = choice.finish_reason ?? answer.finish;
        if (!take(answer, choice.delta ?? {})) continue;
        clock.tick();
        onNews();
        if (performance.now() - kept < KEEP_MS) continue;
        if (kept < 0) this.set({ head: answer.id }); // whoever opens the conversation now sees this version
        kept = performance.now();
        this.keep(answer);
        this.tell();
      }
    } catch (error) {
      if (signal.aborted) answer.finish = "stopped";
      else Object.assign(answer, { error: error.message, finish: "", locked: error.status === 401 });
    }
  }

  // What is kept of an answer that is being written is that it was stopped: should the page go, it was.
  keep(answer) {
    const { locked, ...kept } = answer;
    return this.store.write([kept.finish || kept.error ? kept : { ...kept, finish: "stopped" }]);
  }

  stop() {
    this.abort?.abort();
  }

  // Removes a message and what follows it, which can be undone.
  async remove(message) {
    if (this.busy) return;
    const { conversation, tree } = this;
    const gone = tree.below(message);
    const { head } = conversation;
    const others = tree.versions(message).filter(({ id }) => id !== message.id);
    tree.remove(gone);
    this.toast.show(gone.length > 1 ? `Deleted, with the ${gone.length - 1} below.` : "Deleted.", () =>
      this.restore(conversation, gone, head),
    );
    await Promise.all([this.store.write([], gone), this.choose(tree.leaf(others.at(-1)?.id ?? message.parent))]);
  }

  // Puts removed messages back, and shows them once the browser keeps them: a reload behind that loses none. An answer
  // that is being written stays on the page.
  async restore(conversation, gone, head) {
    await this.store.write(gone);
    if (this.conversation.id !== conversation.id) return this.store.patch(conversation, { head });
    const { byId } = this.tree; // read again meanwhile if another tab wrote
    this.tree = new Tree([...byId.values(), ...gone.filter(({ id }) => !byId.has(id))]);
    this.draw();
    return this.choose(head);
  }

  toEnd() {
    this.isAtEnd = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.top = this.scroller.scrollTop;
  }
}

// Writes the times of an answer into it.
class Clock {
  constructor(answer) {
    this.answer = answer;
    this.start = performance.now();
    this.first = null;
  }

  tick() {
    const now = performance.now();
    this.first ??= now;
    this.answer.first_ms = this.first - this.start;
    this.answer.generation_ms = now - this.first;
    if (this.answer.thought && !this.answer.content) this.answer.thought_ms = now - this.first;
  }
}

// Whether there was anything in a chunk's delta.
function take(answer, { content, reasoning_content: thought, tool_calls: calls }) {
  if (content) answer.content += content;
  if (thought) answer.thought = (answer.thought ?? "") + thought;
  for (const { index, id, function: said } of calls ?? []) {
    answer.calls ??= [];
    answer.calls[index] ??= { id, name: said.name, arguments: "" };
    answer.calls[index].arguments += said.arguments ?? "";
  }
  return Boolean(content || thought || calls);
}

// What was said, as the API wants it. An answer that failed before its first token was never a turn, and calls without
// their results are none.
function messagesOf(path, system) {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  path.forEach((message, place) => {
    const { role, content, thought, calls, results } = message;
    if (role === "user") messages.push({ role, content: contentOf(message) });
    else if (role === "tool")
      messages.push(...results.map((result) => ({ role, tool_call_id: result.id, content: result.content })));
    else if (path[place + 1]?.role === "tool") {
      const asked = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      messages.push({ role, content: content || null, tool_calls: asked, ...(thought ? { reasoning_content: thought } : {}) });
    } else if (content) messages.push({ role, content });
  });
  return messages;
}

// Text, or where there are pictures that the browser has kept a list of parts.
function contentOf(message) {
  const text = withFiles(message);
  const urls = (message.pictures ?? []).map(({ url }) => url).filter(Boolean);
  if (!urls.length) return text;
  return [...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])];
}

export function withFiles({ content, files = [] }) {
  return [...files.map(fenced), content].filter(Boolean).join("\n\n");
}

// A fence is longer than any in the text.
function fenced({ name, text }) {
  let ticks = "```";
  for (const [run] of text.matchAll(/`{3,}/g)) if (run.length >= ticks.length) ticks = `${run}\``;
  return `${name}:\n${ticks}\n${text.replace(/\n$/, "")}\n${ticks}`;
}

function titleOf({ content, files, pictures }) {
  const line = (content || [...(files ?? []), ...(pictures ?? [])][0]?.name || "New chat").trim().split("\n", 1)[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}
