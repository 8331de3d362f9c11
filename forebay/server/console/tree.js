// A conversation is a tree of messages: each knows its parent, and of those with one parent one is shown.

let last = 0; // the time of the newest id

// Ids sort by when they were made, those of one millisecond too, and no two tabs make the same one.
export function newId() {
  last = Math.max(Date.now(), last + 1);
  const random = crypto.getRandomValues(new Uint32Array(2));
  return last.toString(36).padStart(9, "0") + [...random].map((part) => part.toString(36).padStart(7, "0")).join("");
}

export class Tree {
  constructor(messages = []) {
    this.byId = new Map();
    this.children = new Map(); // parent's id, "" for none -> ids, oldest first
    for (const message of [...messages].sort((a, b) => (a.id < b.id ? -1 : 1))) this.add(message);
  }

  add(message) {
    this.byId.set(message.id, message);
    const parent = message.parent ?? "";
    this.children.set(parent, [...(this.children.get(parent) ?? []), message.id]);
  }

  get(id) {
    return this.byId.get(id);
  }

  // From the first message to `head`. Where a message is missing, what follows it begins the path.
  path(head) {
    const path = [];
    for (let at = this.byId.get(head); at; at = this.byId.get(at.parent)) path.unshift(at);
    return path;
  }

  // Whether each message has an end above it: none is, by its parents, above itself.
  get isSound() {
    const sound = new Set();
    for (const start of this.byId.values()) {
      const path = new Set();
      for (let at = start; at && !sound.has(at); at = this.byId.get(at.parent)) {
        if (path.has(at)) return false;
        path.add(at);
      }
      for (const each of path) sound.add(each);
    }
    return true;
  }

  // The versions of a message: those with its parent, itself among them.
  versions(message) {
    return this.children.get(message.parent ?? "").map((id) => this.byId.get(id));
  }

  // The newest message below `id`, or itself; of no id the newest of all.
  leaf(id) {
    for (;;) {
      const below = this.children.get(id ?? "");
      if (!below?.length) return id ?? null;
      id = below.at(-1);
    }
  }

  // Where a conversation whose shown version ended with `head` goes on.
  tip(head) {
    return this.leaf(this.byId.has(head) ? head : null);
  }

  // A message and all below it, parents first.
  below(message) {
    const found = [message];
    for (const each of found) found.push(...(this.children.get(each.id) ?? []).map((id) => this.byId.get(id)));
    return found;
  }

  remove(messages) {
    for (const { id, parent } of messages) {
      this.byId.delete(id);
      this.children.set(parent ?? "", (this.children.get(parent ?? "") ?? []).filter((each) => each !== id));
    }
  }
}
