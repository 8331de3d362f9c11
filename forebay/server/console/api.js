// The server's HTTP API as this page uses it. Every failure is an ApiError with the server's own message.
// Paths are relative, so that the page also works under a prefix of a reverse proxy.

const KEY = "forebay.key";
const SESSION = "forebay.session";
const USAGE = { include_usage: true, continuous_usage_stats: true }; // with each event: an answer may be stopped at any

export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(extra) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function request(path, init = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...init, headers: headers(init.headers) });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  const fallback = `The server answered HTTP ${response.status} without a message.`;
  try {
    const answer = JSON.parse(text);
    const said = answer.error ?? { message: answer.message, code: answer.reason }; // the latter: /ready, /debug/state
    return new ApiError(said.message || fallback, { status: response.status, code: said.code || "" });
  } catch {
    return new ApiError(text.slice(0, 300) || fallback, { status: response.status });
  }
}

// A server that neither answers nor closes must not hold up the next poll for ever.
const POLL_TIMEOUT_MS = 5000;

export async function getJson(path) {
  return (await request(path, { signal: AbortSignal.timeout(POLL_TIMEOUT_MS) })).json();
}

export const post = (path, body = {}) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

export async function postJson(path, body) {
  return (await post(path, body)).json();
}

// What requests of this browser have in common: the server tells of cached text to whom it belongs.
export function session() {
  const name = localStorage.getItem(SESSION) ?? crypto.getRandomValues(new Uint32Array(4)).join("-");
  localStorage.setItem(SESSION, name);
  return name;
}

// Throws ApiError (status 503) with the server's reason while it is not ready.
export async function checkReady() {
  await request("ready", { signal: AbortSignal.timeout(POLL_TIMEOUT_MS) });
}

// Yields the chunks of one streamed chat completion; throws ApiError also for an error inside the stream and for a
// stream that ends without [DONE].
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ prompt_cache_key: session(), ...body, stream: true, stream_options: USAGE }),
    signal,
  });
  for await (const data of sseData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code || "" });
    yield chunk;
  }
  throw new ApiError("The connection closed before the answer was complete.");
}

// The `data` of each server-sent event: events end at a blank line, several data lines are joined.
export async function* sseData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let lines = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const parts = (rest + value).split(/\r\n|\n/);
      rest = parts.pop();
      for (const line of parts) {
        if (line.startsWith("data:")) lines.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && lines.length) {
          yield lines.join("\n");
          lines = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early closes the connection, and with it the request
  }
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError("The connection to the server was lost.");
}
