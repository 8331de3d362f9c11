// Numbers with units.

const WHOLE = new Intl.NumberFormat("en");

export const whole = (n) => WHOLE.format(n);

export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

// "22.5 KiB", "1.2 GiB"
export function size(bytes) {
  let unit = 0;
  while (bytes >= 1023.5 && unit < 4) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${unit && bytes < 99.95 ? Number(bytes.toFixed(1)) : whole(Math.round(bytes))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

// "just now", "40 s ago", "3 min ago"
export function ago(s) {
  if (s < 5) return "just now";
  if (s < 90) return `${Math.round(s)} s ago`;
  return s < 5400 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
}

export function seconds(ms) {
  if (ms < 995) return `${Math.round(ms)} ms`;
  return ms < 99500 ? `${(ms / 1000).toFixed(2)} s` : `${Math.round(ms / 1000)} s`;
}

export const rate = (perSecond) => (perSecond < 99.95 ? perSecond.toFixed(1) : whole(Math.round(perSecond)));

// Why the rest of the prompt was not in the cache: `usage.cache.miss_reason` in words.
const MISS = {
  cache_disabled: "the cache is off",
  no_shared_prefix: "no shared prefix",
  released: "released while asleep",
  diverged: "then it diverged",
  not_cached_yet: "the rest is new",
  evicted: "the rest was evicted",
  evicted_from_disk: "the rest was removed from the files",
  not_loaded_in_time: "the rest was not copied from another tier",
  kv_present_state_missing: "no state to go on from",
  kv_present_window_missing: "its window is gone",
  below_page: "the rest is shorter than a page",
  prompt_logprobs: "log-probabilities need every position",
  pooling: "a vector of the whole text needs every position",
  retracted: "computed again after a retraction",
};

// "12 tokens · 96 of 112 prompt tokens cached, the rest is new · first token 210 ms · 31.0 tok/s · stop"
export function statsLine({ usage, first_ms: firstMs, generation_ms: generationMs, finish, error }) {
  const parts = [];
  if (usage) {
    parts.push(plural(usage.completion_tokens, "token"));
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const reason = usage.cache?.miss_reason;
    const why = MISS[reason] ?? (reason && reason !== "none" ? reason : "");
    parts.push(`${whole(cached)} of ${plural(usage.prompt_tokens, "prompt token")} cached${why ? `, ${why}` : ""}`);
  }
  if (firstMs !== undefined) parts.push(`first token ${seconds(firstMs)}`);
  if (usage && usage.completion_tokens > 1 && generationMs > 0)
    parts.push(`${rate(((usage.completion_tokens - 1) * 1000) / generationMs)} tok/s`);
  if (finish && !error) parts.push(finish);
  return parts.join(" · ");
}
