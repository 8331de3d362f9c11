// The pools as bars: who holds what of the engine's memory, magnified where it is little of a large pool.

import { plural, size, whole } from "./format.js";
import { make } from "./nodes.js";
import { draw, picture, share } from "./svg.js";

const HOLDERS = ["running", "cached", "quarantined"];
const LITTLE = 0.15; // of a pool: less, and of several holders, is drawn once more over the whole width
const KINDS = {
  kv: { name: "KV pages", one: "page", of: (n) => `pages of ${plural(n, "token")}` },
  window: { name: "window pages", one: "page", of: (n) => `pages of ${plural(n, "token")} of a sliding window` },
  state: { name: "state slots", one: "slot", of: () => "slots, each the state of all recurrent layers after some token" },
  rows: { name: "request rows", one: "row", of: () => "rows, one for each request that runs" },
};

// `engine` is what /server_info says of it: tokens of a page, bytes of a slot of each pool; {} where that is not known.
export function poolView(pool, engine) {
  const [kind, server] = kindOf(pool.name);
  const { name = pool.name.replaceAll("_", " "), of = () => "slots" } = KINDS[kind] ?? {};
  const used = pool.total - pool.free;
  const bytes = engine.slot_bytes?.[kind] ?? 0;
  const title = make("h3", "", server + name, make("span", "", bytes && kind !== "rows" ? `${size(used * bytes)} of ${size(pool.total * bytes)}` : `${whole(used)} of ${whole(pool.total)}`));
  const view = make("section", "pool", title, bars(pool, used, server + name));
  const words = make("p", "words", inWords(pool, kind, of, bytes, engine.page_size));
  words.id = `pool-${pool.name.replaceAll(/\W/g, "-")}`;
  view.append(words);
  view.tabIndex = 0;
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", server + name);
  view.setAttribute("aria-describedby", words.id);
  return view;
}

// Behind a router a pool's name begins with its server's.
function kindOf(name) {
  const kind = name.split(" ").at(-1);
  return [kind, name.slice(0, name.length - kind.length)];
}

// "5,824 pages of 16 tokens, 22.5 KiB a token; 8 in use by running requests, 240 by the cache, 5,576 free."
function inWords(pool, kind, of, bytes, pageSize) {
  const isPages = kind === "kv" || kind === "window";
  const each = bytes ? `, ${isPages && pageSize ? `${size(bytes / pageSize)} a token` : `${size(bytes)} each`}` : "";
  const parts = [`${whole(pool.running)} in use by running requests`];
  if (kind !== "rows") parts.push(`${whole(pool.cached)} by the cache`);
  if (pool.quarantined) parts.push(`${whole(pool.quarantined)} set aside because nobody knows who holds them`);
  parts.push(`${whole(pool.free)} free`);
  return `${whole(pool.total)} ${of(pageSize || 0)}${each}; ${parts.join(", ")}.`;
}

function bars(pool, used, name) {
  const isLittle = HOLDERS.filter((holder) => pool[holder]).length > 1 && used < LITTLE * pool.total;
  const words = `${name}: ${[...HOLDERS, "free"].map((holder) => `${whole(pool[holder] ?? 0)} ${holder}`).join(", ")}`;
  const first = draw("rect", { class: "free", x: 0, y: 0, width: "100%", height: 9, rx: 2 });
  const parts = [first, ...partsOf(pool, pool.total, 0, 9)];
  if (isLittle) {
    const cone = draw("svg", { y: 9, width: "100%", height: 9, viewBox: "0 0 100 9", preserveAspectRatio: "none" });
    cone.append(draw("path", { class: "cone", d: `M0 0H${Math.max(1, (100 * used) / pool.total)}L100 9H0z` }));
    parts.push(cone, ...partsOf(pool, used, 18, 13));
  }
  return picture("pool-bars", words, { width: "100%", height: isLittle ? 31 : 9 }, ...parts);
}

function partsOf(pool, total, y, height) {
  let start = 0;
  return HOLDERS.filter((holder) => pool[holder]).map((holder) => {
    const part = draw("rect", { x: share(start, total), y, width: share(pool[holder], total), height, "data-holder": holder });
    start += pool[holder];
    return part;
  });
}

// A server behind a router: whether it takes requests, and how many it has.
export function memberView(member) {
  const view = make("li", "", make("span", "", member.name));
  const status = make("span", "ready", member.up ? plural(member.in_flight, "request") : "down");
  status.dataset.state = member.up ? "ready" : "not-ready";
  view.title = member.up ? member.url : `${member.url}: ${member.why}`;
  view.append(status);
  return view;
}
