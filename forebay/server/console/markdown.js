// Markdown to DOM nodes, for text that a model wrote and nobody checked.
//
// Safe by construction: text only ever becomes text nodes, elements come from the fixed set below, and the one
// attribute taken from the text is an http(s) or mailto href. Raw HTML stays text; images become links, so that looking
// at an answer fetches nothing.

const MAX_INLINE = 20000; // characters of one block; longer ones stay plain, which bounds the time of the scanner
const MAX_DEPTH = 6; // nested quotes, lists and emphasis

// Shows `text` in `root`, keeping the nodes of blocks that did not change: a selection survives while text streams in.
export function render(root, text) {
  const blocks = split(text);
  const old = root.markdownSources ?? [];
  let same = 0;
  while (same < old.length && same < blocks.length && old[same] === blocks[same].source) same++;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const block of blocks.slice(same)) root.append(node(block, 0));
  root.markdownSources = blocks.map((block) => block.source);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:-[ -]*-[ -]*-|\*[ *]*\*[ *]*\*|_[ _]*_[ _]*_)[ -]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const OPENERS = [FENCE, HEADING, RULE, ITEM, QUOTE];

function split(text) {
  const lines = text.split(/\r?\n/);
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [kind, end] = extent(lines, at);
    const body = lines.slice(at, end);
    blocks.push({ kind, lines: body, source: body.join("\n") });
    at = end;
  }
  return blocks;
}

// The kind of the block that starts at `at`, and the line after its last.
function extent(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return ["code", fenceEnd(lines, at)];
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (QUOTE.test(line)) return ["quote", runEnd(lines, at, (next) => QUOTE.test(next))];
  if (ITEM.test(line)) return ["list", listEnd(lines, at)];
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|"))
    return ["table", runEnd(lines, at, (next) => next.includes("|"))];
  return ["text", runEnd(lines, at, (next) => next.trim() && !OPENERS.some((opener) => opener.test(next)))];
}

function runEnd(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end])) end++;
  return end;
}

function fenceEnd(lines, at) {
  const fence = FENCE.exec(lines[at])[1];
  for (let end = at + 1; end < lines.length; end++) {
    const line = lines[end].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) return end + 1;
  }
  return lines.length; // still streaming
}

function listEnd(lines, at) {
  const ordered = isOrdered(lines[at]);
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      if (!(/^\s{2,}\S/.test(next) || (ITEM.test(next) && isOrdered(next) === ordered))) break;
    } else if (!/^\s{2,}/.test(line)) {
      if (ITEM.test(line) ? isOrdered(line) !== ordered : OPENERS.some((opener) => opener.test(line))) break;
      if (RULE.test(line)) break;
    }
  }
  return end;
}

const isOrdered = (line) => /\d/.test(ITEM.exec(line)?.[2] ?? "");

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function node({ kind, lines, source }, depth) {
  if (depth > MAX_DEPTH) return text("p", source, depth);
  switch (kind) {
    case "code":
      return code(lines);
    case "heading": {
      const [, marks, title] = HEADING.exec(lines[0]);
      // The page's own headings are h1 and h2: an answer's begin below them.
      return text(`h${Math.min(6, marks.length + 2)}`, title.replace(/\s+#+\s*$/, ""), depth);
    }
    case "rule":
      return document.createElement("hr");
    case "quote":
      return nested("blockquote", lines.map((line) => line.replace(QUOTE, "")), depth);
    case "list":
      return list(lines, depth);
    case "table":
      return table(lines, depth);
    default:
      return text("p", source, depth);
  }
}

function text(tag, source, depth) {
  const made = element(tag, "", ...inline(source, depth));
  made.dir = "auto";
  return made;
}

function nested(tag, lines, depth) {
  const made = element(tag, "");
  for (const block of split(lines.join("\n"))) made.append(node(block, depth + 1));
  return made;
}

function code(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const last = lines.at(-1).trim();
  const closed = lines.length > 1 && last.length >= fence.length && last === fence[0].repeat(last.length);
  const body = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", "quiet copy-code", "Copy");
  copy.type = "button";
  const pre = element("pre", "", element("code", "", body));
  pre.tabIndex = 0; // it scrolls sideways, also from the keyboard
  pre.setAttribute("aria-label", language ? `${language} code` : "code");
  return element("figure", "code", element("figcaption", "", element("span", "", language || "text"), copy), pre);
}

function list(lines, depth) {
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    const sibling = match && match[1].length < Math.max(2, items.at(-1)?.indent ?? 4);
    if (sibling) items.push({ indent: match[1].length + match[2].length + match[3].length, lines: [match[4]] });
    else {
      const item = items.at(-1);
      item.lines.push(line.replace(new RegExp(`^\\s{0,${Math.max(2, item.indent)}}`), ""));
    }
  }
  const made = element(isOrdered(lines[0]) ? "ol" : "ul", "");
  const first = parseInt(ITEM.exec(lines[0])[2], 10);
  if (made.tagName === "OL" && first !== 1) made.start = first;
  for (const item of items) {
    const entry = nested("li", item.lines, depth);
    // A tight item is a line, not a paragraph.
    if (entry.firstChild?.tagName === "P") entry.firstChild.replaceWith(...entry.firstChild.childNodes);
    made.append(entry);
  }
  return made;
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (line, tag) => element("tr", "", ...cells(line).map((cell) => text(tag, cell.trim(), depth)));
  const head = element("thead", "", row(lines[0], "th"));
  const body = element("tbody", "", ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", "table", element("table", "", head, body));
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const SPECIAL = /[\\`*_~[!<]|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;

// The nodes of one block's text. One pass from left to right; what cannot be closed stays as it was written.
function inline(source, depth) {
  if (source.length > MAX_INLINE || depth > MAX_DEPTH) return [source];
  const out = [];
  let plain = 0;
  let at = 0;
  SPECIAL.lastIndex = 0;
  for (;;) {
    SPECIAL.lastIndex = at;
    const hit = SPECIAL.exec(source);
    if (!hit) break;
    const span = spanAt(source, hit.index, depth);
    if (!span) {
      at = hit.index + hit[0].length;
      continue;
    }
    if (hit.index > plain) out.push(source.slice(plain, hit.index));
    out.push(span.node);
    plain = at = span.end;
  }
  if (plain < source.length) out.push(source.slice(plain));
  return out;
}

function spanAt(source, at, depth) {
  const char = source[at];
  if (char === "\\") return PUNCTUATION.test(source[at + 1] ?? "") ? { node: source[at + 1], end: at + 2 } : null;
  if (char === "`") return codeSpan(source, at);
  if (char === "h") return bareUrl(source, at);
  if (char === "[") return linkAt(source, at, depth, "");
  if (char === "!") return source[at + 1] === "[" ? linkAt(source, at + 1, depth, "image: ") : null;
  if (char === "<") return angleUrl(source, at);
  for (const [mark, tag] of MARKS) {
    if (source.startsWith(mark, at)) return emphasis(source, at, mark, tag, depth);
  }
  return null;
}

function codeSpan(source, at) {
  const ticks = /^`+/.exec(source.slice(at, at + 16))[0];
  const close = source.indexOf(ticks, at + ticks.length);
  if (close < 0) return null;
  return { node: element("code", "", source.slice(at + ticks.length, close)), end: close + ticks.length };
}

function emphasis(source, at, mark, tag, depth) {
  const start = at + mark.length;
  const inWord = mark[0] === "_" && /\w/.test(source[at - 1] ?? "");
  if (inWord || !/\S/.test(source[start] ?? "")) return null;
  let close = source.indexOf(mark, start + 1);
  // A single mark is not closed by half of a double one.
  while (close > 0 && mark.length === 1 && source[close + 1] === mark) close = source.indexOf(mark, close + 2);
  if (close < 0 || /\s/.test(source[close - 1])) return null;
  return { node: element(tag, "", ...inline(source.slice(start, close), depth + 1)), end: close + mark.length };
}

function linkAt(source, at, depth, prefix) {
  const middle = source.indexOf("](", at);
  const close = middle < 0 ? -1 : source.indexOf(")", middle);
  if (close < 0 || source.slice(at + 1, middle).includes("[")) return null;
  const href = safeHref(source.slice(middle + 2, close).trim().split(/\s/)[0]);
  if (!href) return null;
  const label = source.slice(at + 1, middle) || href;
  return { node: anchor(href, [prefix, ...inline(label, MAX_DEPTH)]), end: close + 1 };
}

function bareUrl(source, at) {
  const url = /^https?:\/\/[^\s<>"`]{1,2000}/.exec(source.slice(at, at + 2048))?.[0].replace(/[.,;:!?)'*_]+$/, "");
  const href = url && safeHref(url);
  return href ? { node: anchor(href, [url]), end: at + url.length } : null;
}

function angleUrl(source, at) {
  const close = source.indexOf(">", at);
  const url = source.slice(at + 1, close);
  const href = close > 0 && /^(?:https?:|mailto:)\S+$/.test(url) && safeHref(url);
  return href ? { node: anchor(href, [url]), end: close + 1 } : null;
}

function safeHref(url) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(url) || !URL.canParse(url)) return null;
  return new URL(url).href;
}

function anchor(href, children) {
  const made = element("a", "", ...children);
  made.href = href;
  made.title = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}
