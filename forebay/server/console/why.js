// What became of a request: its explanation in lines, loaded when it is first asked for.

import { getJson } from "./api.js";
import { plural, seconds, whole } from "./format.js";

const WAITED = {
  turn: "its turn",
  row: "a place among those that run",
  memory: "memory",
  prefix: "a prefix that another request computed",
  pictures: "its images",
};

// Throws ApiError: the server knows the last 1,000 requests of a key.
export async function explain(id) {
  return linesOf(await getJson(`debug/explain/${encodeURIComponent(id)}`));
}

export function linesOf(said) {
  const kinds = Object.entries(said.matched_tokens).map(([kind, tokens]) => `${kind} ${whole(tokens)}`);
  const first = said.first_token_s === null ? "no token" : `first token after ${seconds(said.first_token_s * 1000)}`;
  const lines = [
    `${said.server} had it for ${seconds(said.total_s * 1000)}`,
    `waited ${seconds(said.waited_s * 1000)} for ${WAITED[said.waited_for] ?? said.waited_for}`,
    `prompt computed in ${plural(said.chunks, "chunk")}, ${first}`,
    `${whole(said.cached_tokens)} of ${plural(said.prompt_tokens, "prompt token")} cached (${kinds.join(", ")})`,
    `nearest cached prefix: ${plural(said.nearest_prefix, "token")}${said.difference ? `, ${said.difference}` : ""}`,
  ];
  if (said.retractions)
    lines.push(`retracted ${plural(said.retractions, "time")}, ${plural(said.recomputed_tokens, "token")} computed again`);
  return [...lines, ...said.would_help.map((help) => `would help: ${help}`)];
}
