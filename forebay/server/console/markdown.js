// Markdown to DOM nodes, for text that a model wrote and nobody checked. Loaded when the first answer is drawn.
//
// Two walls. Tags in the text become text, but for a few that carry no attributes; what marked makes of the rest goes
// through DOMPurify, whose list has only what is meant to come out. Images become links, so that looking at an answer
// fetches nothing.

import { Marked } from "./vendor/marked/marked.esm.js";
import "./vendor/dompurify/purify.min.js"; // sets globalThis.DOMPurify
import { button, make } from "./nodes.js";

const purify = globalThis.DOMPurify;

const MAX_BLOCK = 20000; // characters of one block that is read; longer ones stay plain, which bounds the time
const MAX_DEPTH = 30; // quotes or lists in each other
const MAX_HIGHLIGHTED = 50000; // characters of code
const PLAIN_TAGS = /&lt;(\/?)(br|sub|sup|kbd|u|mark)\s*\/?&gt;/gi;
const SAFE_URL = /^(?:https?:\/\/|mailto:)/i;
const DEFINITION = /^ {0,3}\[[^\]\n]+\]:/m;

const ALLOWED = {
  ALLOWED_TAGS: (
    "p br h3 h4 h5 h6 hr ul ol li blockquote pre code strong em del table thead tbody tr th td a span div sub sup kbd u mark"
  ).split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOWED_URI_REGEXP: SAFE_URL,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (char) => ESCAPES[char]);

// $ opens maths where no space follows it and closes it where none stands before and no digit after: prices are none.
const INLINE_MATH =
  /^(?:\\\(([^]{1,2000}?)\\\)|\\\[([^]{1,4000}?)\\\]|\$\$([^$]{1,4000}?)\$\$|\$(?![\s$])((?:\\.|[^$\\\n]){0,500}?[^\s$\\])\$(?![\d$]))/;
const BLOCK_MATH = /^ {0,3}(?:\$\$([^]{1,8000}?)\$\$|\\\[([^]{1,8000}?)\\\])[ \t]*(?:\n|$)/;

// A note's text ends at an empty line or the next note.
const NOTE = /^ {0,3}\[\^([^\]\s]{1,60})\]:[ \t]*([^]*?)(?=\n[ \t]*(?:\n|\[\^[^\]\s]{1,60}\]:)|\n?$)/;
const NOTE_MARK = /^\[\^([^\]\s]{1,60})\]/;

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    // The page's own headings are h1 and h2: an answer's begin below them.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    html({ text, block }) {
      const shown = escape(text).replace(PLAIN_TAGS, "<$1$2>");
      return block ? `<p class="plain">${shown.trim()}</p>` : shown;
    },
    image: ({ href, text, raw }) => (SAFE_URL.test(href) ? `<a href="${escape(href)}">image: ${escape(text || href)}</a>` : escape(raw)),
    link({ href, tokens, raw }) {
      return SAFE_URL.test(href) ? `<a href="${escape(href)}">${this.parser.parseInline(tokens)}</a>` : escape(raw);
    },
    checkbox: ({ checked }) => `<span class="task">${checked ? "☑" : "☐"}</span> `,
  },
  extensions: [
    {
      name: "mathBlock",
      level: "block",
      start: (source) => {
        const at = source.search(/\n {0,3}(?:\$\$|\\\[)/);
        return at < 0 ? undefined : at + 1;
      },
      tokenizer(source) {
        const found = BLOCK_MATH.exec(source);
        return found ? { type: "mathBlock", raw: found[0], tex: found[1] ?? found[2] } : undefined;
      },
      renderer: ({ tex }) => `<div class="math display">${escape(tex.trim())}</div>`,
    },
    {
      name: "mathInline",
      level: "inline",
      start: (source) => {
        const at = source.search(/\$|\\[([]/);
        return at < 0 ? undefined : at;
      },
      tokenizer(source) {
        const found = INLINE_MATH.exec(source);
        if (!found) return undefined;
        const display = found[2] ?? found[3];
        return { type: "mathInline", raw: found[0], tex: display ?? found[1] ?? found[4], display: display !== undefined };
      },
      renderer: ({ tex, display }) => `<span class="math${display ? " display" : ""}">${escape(tex.trim())}</span>`,
    },
    {
      name: "note",
      level: "block",
      start: (source) => {
        const at = source.search(/\n {0,3}\[\^[^\]\s]{1,60}\]:/);
        return at < 0 ? undefined : at + 1;
      },
      tokenizer(source) {
        const found = NOTE.exec(source);
        if (!found) return undefined;
        const [raw, label, text] = found;
        this.lexer.tokens.links[`^${label}`] = { href: "", title: "" }; // lines are read after all blocks: marks know
        return { type: "note", raw, label, tokens: this.lexer.inline(text) };
      },
      renderer({ label, tokens }) {
        return `<div class="note"><sup>${escape(label)}</sup><span>${this.parser.parseInline(tokens)}</span></div>`;
      },
    },
    {
      name: "noteMark",
      level: "inline",
      tokenizer(source) {
        const found = NOTE_MARK.exec(source);
        if (!found || !this.lexer.tokens.links[`^${found[1]}`]) return undefined;
        return { type: "noteMark", raw: found[0], label: found[1] };
      },
      renderer: ({ label }) => `<sup class="note-mark">${escape(label)}</sup>`,
    },
  ],
});

// The text of an answer in `root`. While it grows, only its last block is read again: nodes of the others stay, and
// with them a selection.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.begin();
  }

  begin() {
    this.root.replaceChildren();
    this.length = 0; // of the text as of the last look
    this.read = 0; // characters that are blocks for good
    this.kept = 0; // nodes of them
    this.code = null; // the last block, if it is code
    this.done = false;
  }

  // `text` begins with what it was the last time. `done`: no more will come.
  update(text, done) {
    const whole = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    if (whole.length === this.length && done && this.done) return;
    if (whole.length < this.length || this.done || (done && DEFINITION.test(whole))) this.begin();
    this.length = whole.length;
    this.done = done;
    const tokens = lex(whole.slice(this.read));
    let open = done ? tokens.length : tokens.findLastIndex((token) => token.type !== "space");
    if (open < 0) open = tokens.length;
    if (open === 0 && this.code && this.grow(tokens[0])) return;
    this.code = null;
    while (this.root.childNodes.length > this.kept) this.root.lastChild.remove();
    for (const token of tokens.slice(0, open)) {
      this.root.append(nodesOf(token, tokens.links));
      this.read += token.raw.length;
    }
    this.kept = this.root.childNodes.length;
    for (const figure of this.fresh("figure")) highlight(figure.querySelector("code"));
    for (const math of this.fresh(".math")) typeset(math);
    for (const token of tokens.slice(open)) this.root.append(nodesOf(token, tokens.links));
    const last = this.root.lastChild;
    if (open < tokens.length && last?.tagName === "FIGURE") this.code = last.querySelector("code");
    else if (open < tokens.length) for (const math of last?.querySelectorAll?.(".math") ?? []) typeset(math);
    if (done) linkNotes(this.root);
  }

  // Those that nobody has looked at yet.
  fresh(selector) {
    return this.root.querySelectorAll(`${selector}:not([data-seen])`);
  }

  // Whether the open code block only became longer: then its text does, and nothing else is touched.
  grow(token) {
    if (token.type !== "code" || !token.text.startsWith(this.code.textContent)) return false;
    const text = this.code.firstChild ?? this.code.appendChild(document.createTextNode(""));
    text.appendData(token.text.slice(text.length));
    return true;
  }
}

const NESTED = new RegExp(`^(?:[ \\t]*(?:>|[-*+]|\\d{1,9}[.)])){${MAX_DEPTH}}`, "m");

// The blocks of `source`; what cannot be read is one plain block.
function lex(source) {
  if (!NESTED.test(source)) {
    try {
      const tokens = marked.lexer(source);
      if (tokens.map((token) => token.raw).join("") === source) return tokens;
    } catch {
      // Too deep, or a text that the parser is not made for.
    }
  }
  return Object.assign([{ type: "plain", raw: source }], { links: {} });
}

function nodesOf(token, links) {
  if (token.type === "plain" || (token.raw.length > MAX_BLOCK && token.type !== "code")) {
    const plain = make("p", "plain", token.raw);
    plain.dir = "auto";
    return plain;
  }
  if (token.type === "space") return document.createDocumentFragment();
  return polished(purify.sanitize(marked.parser(Object.assign([token], { links })), ALLOWED));
}

function polished(fragment) {
  for (const block of fragment.querySelectorAll("p, h3, h4, h5, h6, li, th, td, .note > span")) block.dir = "auto";
  for (const link of fragment.querySelectorAll("a")) openElsewhere(link);
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "table");
    box.tabIndex = 0; // it scrolls sideways, also from the keyboard
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    table.replaceWith(box);
    box.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) frame(pre);
  for (const node of [...fragment.childNodes]) if (node.nodeType === Node.TEXT_NODE && !node.data.trim()) node.remove();
  return fragment;
}

// Marks lead to their notes, and a note back to its first mark. Not by addresses: the page's says which chat is open.
function linkNotes(root) {
  const notes = new Map([...root.querySelectorAll(".note")].map((note) => [note.firstChild.textContent, note]));
  for (const mark of root.querySelectorAll(".note-mark")) {
    const label = mark.textContent;
    const note = notes.get(label);
    if (!note) continue; // it is in a block that stays plain
    const there = leading(label, `Note ${label}`, note);
    mark.replaceChildren(there);
    if (!note.hasAttribute("tabindex")) note.append(leading("↩", `Back from note ${label}`, there));
    note.tabIndex = -1;
  }
}

function leading(text, label, target) {
  const made = button(text, () => target.focus());
  made.setAttribute("aria-label", label);
  made.setAttribute("role", "link");
  return made;
}

// In a tab of its own that knows nothing of this one, and with the host in sight where the label hides it.
function openElsewhere(link) {
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  link.title = link.href;
  const host = link.protocol === "mailto:" ? link.pathname : link.host;
  if (!link.textContent.includes(host)) link.dataset.host = host;
}

function frame(pre) {
  const code = pre.querySelector("code");
  code.textContent = code.textContent.replace(/\n$/, "");
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const copy = button("Copy", () => {});
  copy.classList.add("copy-code");
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", language ? `${language} code` : "code");
  const figure = make("figure", "code", make("figcaption", "", make("span", "", language || "text"), copy));
  pre.replaceWith(figure);
  figure.append(pre);
}

let highlighter;

async function highlight(code) {
  code.closest("figure").dataset.seen = "";
  const language = /language-(\S+)/.exec(code.className)?.[1];
  if (!language || code.textContent.length > MAX_HIGHLIGHTED) return;
  highlighter ??= import("./vendor/highlight/highlight.min.js");
  const { default: hljs } = await highlighter;
  if (!hljs.getLanguage(language)) return;
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  const only = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
  code.replaceChildren(purify.sanitize(value, only));
}

let maths;

// What KaTeX does not know stays as it was written.
async function typeset(node) {
  node.dataset.seen = "";
  const tex = node.textContent;
  maths ??= loadMaths();
  try {
    const katex = await maths;
    const displayMode = node.classList.contains("display");
    katex.render(tex, node, { displayMode, throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 });
    if (displayMode) node.tabIndex = 0; // a long one scrolls sideways
  } catch {
    node.classList.add("unread");
    node.textContent = tex;
  }
}

async function loadMaths() {
  const sheet = make("link", "");
  sheet.rel = "stylesheet";
  sheet.href = new URL("./vendor/katex/katex.min.css", import.meta.url).href;
  document.head.append(sheet);
  await import("./vendor/katex/katex.min.js"); // sets globalThis.katex
  return globalThis.katex;
}
