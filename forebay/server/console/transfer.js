// Conversations as files. What is read is checked field by field: a file may be anybody's.

import { withFiles } from "./chat.js";
import { sound } from "./options.js";
import { soundPictures } from "./pictures.js";
import { Tree } from "./tree.js";

const FORMAT = "forebay.conversations";
const VERSION = 1;
const ID = /^[0-9a-z]{8,64}$/;

export const toJson = (conversations) => JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);

export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";

// The versions that are shown, as a person would write them down.
export function toMarkdown({ title, head, options, messages }) {
  const parts = [`# ${title}`];
  if (options?.system) parts.push(`> **System:** ${options.system.replaceAll("\n", "\n> ")}`);
  const tree = new Tree(messages);
  for (const message of tree.path(tree.tip(head))) {
    const { role, content, calls = [], results = [], pictures = [] } = message;
    if (role === "user") parts.push("## You", ...pictures.map(({ name }) => `*Picture: ${name}*`), withFiles(message));
    else if (role === "assistant") parts.push("## Answer", content, ...calls.map((call) => fence(`${call.name}(${call.arguments})`)));
    else parts.push("## Results", ...results.map((result) => fence(result.content)));
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

const fence = (text) => `\`\`\`\n${text}\n\`\`\``;

export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("this is no JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("these are no chats of Forebay.");
  if (file.version !== VERSION) throw new Error(`it is of version ${file.version}; this page reads version ${VERSION}.`);
  return file.conversations.map(conversationOf);
}

function conversationOf(given, place) {
  const wrong = (what) => new Error(`chat ${place + 1} ${what}.`);
  if (!ID.test(given?.id) || !Array.isArray(given.messages)) throw wrong("has no id or no messages");
  const messages = given.messages.map((message) => messageOf(message, given.id));
  if (messages.includes(null)) throw wrong(`has a message that is none: its ${messages.indexOf(null) + 1}th`);
  if (!new Tree(messages).isSound) throw wrong("has a message that is above itself");
  const ids = new Set(messages.map(({ id }) => id));
  return {
    id: given.id,
    title: line(given.title) || "Imported chat",
    created: time(given.created),
    updated: time(given.updated),
    head: ids.has(given.head) ? given.head : null,
    deleted: 0,
    options: sound(given.options),
    messages,
  };
}

const isText = (value) => typeof value === "string";
const line = (value) => (isText(value) ? value.slice(0, 200) : "");
const time = (value) => (Number.isSafeInteger(value) && value > 0 && value < 8.64e15 ? value : Date.now());
const number = (value) => (Number.isFinite(value) ? value : undefined);

// A list of records of texts, or undefined.
function records(value, names) {
  if (!Array.isArray(value)) return undefined;
  return value.filter((each) => names.every((name) => isText(each?.[name]))).map((each) => pick(each, names));
}

const pick = (from, names) => Object.fromEntries(names.map((name) => [name, from[name]]));

function messageOf(given, conversation) {
  const { id, parent, role, content } = given ?? {};
  const results = records(given?.results, ["id", "name", "content"]);
  const isWhole = ID.test(id) && (parent === null || ID.test(parent)) && isText(content);
  if (!isWhole || !["user", "assistant", "tool"].includes(role) || (role === "tool" && !results)) return null;
  const kept = {
    files: records(given.files, ["name", "text"]),
    pictures: soundPictures(given.pictures),
    calls: records(given.calls, ["id", "name", "arguments"]),
    results,
    thought: isText(given.thought) ? given.thought : undefined,
    finish: line(given.finish),
    error: isText(given.error) ? given.error : undefined,
    usage: usageOf(given.usage),
    thought_ms: number(given.thought_ms),
    first_ms: number(given.first_ms),
    generation_ms: number(given.generation_ms),
  };
  const said = Object.fromEntries(Object.entries(kept).filter(([, value]) => value !== undefined));
  return { id, conversation, parent, role, content, ...said };
}

function usageOf(given) {
  if (!Number.isFinite(given?.prompt_tokens) || !Number.isFinite(given?.completion_tokens)) return undefined;
  const cached = given.prompt_tokens_details?.cached_tokens;
  return {
    ...pick(given, ["prompt_tokens", "completion_tokens"]),
    prompt_tokens_details: { cached_tokens: number(cached) ?? 0 },
    cache: { miss_reason: line(given.cache?.miss_reason) },
  };
}
