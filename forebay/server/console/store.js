// Conversations, kept in this browser. One record for each and one for each message, so that tabs that write to the
// same conversation never write over each other; who changes a conversation's record changes fields of it, in one
// transaction. What the browser will not keep is held in memory, as long as the page is open.

import { withoutUrl } from "./pictures.js";

const NAME = "forebay";
const VERSION = 1;
const STORES = ["conversations", "messages"];
const BATCH = 100; // messages looked at together in a search, each of which may have pictures
const UNDO_MS = 3600000; // what was deleted and not brought back is gone after that

export class Store {
  // `onTrouble(text)`: what is said is not kept, and why. `onChange(id)`: another tab changed a conversation.
  constructor({ onTrouble, onChange }) {
    this.onTrouble = onTrouble;
    this.db = null;
    this.opening = null;
    this.held = { conversations: new Map(), messages: new Map() };
    this.channel = new BroadcastChannel(NAME);
    this.channel.onmessage = ({ data }) => onChange(data);
  }

  // Who reads or writes waits for it.
  open() {
    return (this.opening ??= this.connect());
  }

  async connect() {
    try {
      this.db = await opened();
      this.db.onversionchange = () => this.db.close(); // a newer page waits for it
    } catch {
      this.onTrouble("This browser keeps nothing for this page (a private window?): chats are gone when it closes.");
    }
  }

  // Removes what was deleted and will not be brought back.
  async tidy() {
    const cutoff = Date.now() - UNDO_MS;
    for (const { id, deleted } of await this.all()) if (deleted && deleted < cutoff) await this.purge(id);
  }

  // Every conversation, deleted ones too.
  async all() {
    const kept = await this.read("conversations", (store) => store.getAll());
    return merged(kept, this.held.conversations.values());
  }

  async messages(id) {
    const kept = await this.read("messages", (store) => store.index("conversation").getAll(id));
    return merged(kept, [...this.held.messages.values()].filter((message) => message.conversation === id));
  }

  async conversation(id) {
    return (await this.all()).find((each) => each.id === id);
  }

  async read(name, ask) {
    await this.open();
    return this.db ? result(ask(this.db.transaction(name).objectStore(name))) : [];
  }

  // Puts messages and takes messages away, all or none.
  async write(messages, gone = []) {
    await this.change(messages[0]?.conversation ?? gone[0]?.conversation, messages, gone, (tx, put) => {
      for (const message of put) tx.objectStore("messages").put(message);
      for (const { id } of gone) tx.objectStore("messages").delete(id);
    });
  }

  // Puts those of a file's messages that are not there: what was said is never written over.
  async add(messages) {
    await this.change(messages[0]?.conversation, messages, [], (tx, put) => {
      const store = tx.objectStore("messages");
      for (const message of put) {
        const asked = store.getKey(message.id);
        asked.onsuccess = () => asked.result === undefined && store.put(message);
      }
    });
  }

  // Writes these fields of a conversation. Where another tab has removed it, it is there again, whole.
  async patch(conversation, fields) {
    Object.assign(conversation, fields);
    await this.change(conversation.id, [], [], (tx) => {
      const store = tx.objectStore("conversations");
      const asked = store.get(conversation.id);
      asked.onsuccess = () => store.put({ ...(asked.result ?? conversation), ...fields });
    }, conversation);
  }

  // Removes a deleted conversation and its messages for good, unless it has come back meanwhile. Where the storage is full
  // that it was deleted is only held.
  async purge(id) {
    const messages = await this.messages(id);
    const held = this.held.conversations.get(id);
    if (held && !held.deleted) return;
    this.held.conversations.delete(id);
    await this.change(id, [], messages, (tx) => {
      const conversations = tx.objectStore("conversations");
      const asked = conversations.get(id);
      asked.onsuccess = () => {
        if (!held && asked.result && !asked.result.deleted) return;
        conversations.delete(id);
        for (const message of messages) tx.objectStore("messages").delete(message.id);
      };
    });
  }

  // `work(transaction, messages)` does it. What cannot be kept is held; where pictures alone are too large, without these.
  async change(id, messages, gone, work, conversation = null) {
    for (const message of gone) this.held.messages.delete(message.id);
    await this.open();
    try {
      if (!this.db) throw new DOMException("", "NotAllowedError");
      await committed(this.db, (tx) => work(tx, messages));
      if (conversation) this.held.conversations.delete(conversation.id);
      for (const message of messages) this.held.messages.delete(message.id);
    } catch (error) {
      if (conversation) this.held.conversations.set(conversation.id, { ...conversation });
      for (const message of messages) this.held.messages.set(message.id, structuredClone(message));
      const isFull = error.name === "QuotaExceededError";
      if (isFull && (await this.keepTexts(messages, work)))
        this.onTrouble("The browser's storage is full: new pictures are gone when this page closes. Export or delete chats.");
      else if (isFull)
        this.onTrouble("The browser's storage is full: what is new is not kept. Export or delete chats.");
      else if (this.db) this.onTrouble(`The browser does not keep this chat (${error.name}).`);
    }
    this.channel.postMessage(id);
  }

  // Returns whether the messages are kept without their pictures, of which there are some.
  async keepTexts(messages, work) {
    if (!messages.some(({ pictures }) => pictures)) return false;
    const texts = messages.map(({ pictures, ...rest }) => ({ ...rest, ...(pictures ? { pictures: pictures.map(withoutUrl) } : {}) }));
    return committed(this.db, (tx) => work(tx, texts)).then(() => true, () => false);
  }

  // Yields the ids of the conversations a message of which has `text` in it, each once.
  async *search(text) {
    const wanted = text.toLowerCase();
    const found = new Set();
    for (let last = ""; ; ) {
      const batch = await this.read("messages", (store) => store.getAll(IDBKeyRange.lowerBound(last, true), BATCH));
      for (const message of last ? batch : merged(batch, this.held.messages.values())) {
        if (found.has(message.conversation) || !message.content?.toLowerCase().includes(wanted)) continue;
        found.add(message.conversation);
        yield message.conversation;
      }
      if (batch.length < BATCH) return;
      last = batch.at(-1).id;
    }
  }
}

function opened() {
  const asked = indexedDB.open(NAME, VERSION);
  asked.onupgradeneeded = () => {
    const [conversations, messages] = STORES;
    asked.result.createObjectStore(conversations, { keyPath: "id" });
    asked.result.createObjectStore(messages, { keyPath: "id" }).createIndex("conversation", "conversation");
  };
  return result(asked);
}

function result(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

function committed(db, work) {
  return new Promise((resolve, reject) => {
    const tx = db.transaction(STORES, "readwrite");
    tx.oncomplete = () => resolve();
    tx.onabort = () => reject(tx.error ?? new DOMException("", "AbortError"));
    work(tx);
  });
}

function merged(kept, held) {
  return [...new Map([...kept, ...held].map((record) => [record.id, record])).values()];
}
