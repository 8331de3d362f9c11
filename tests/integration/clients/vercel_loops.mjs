// Tool loops of the Vercel AI SDK against a server: BASE. Prints for each dialect, whole and streamed, what the last answer
// said and how many tools were run.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [base] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
const models = {
  chat: { model: openai.chat("tiny") },
  compatible: { model: createOpenAICompatible({ name: "forebay", baseURL: `${base}/v1` })("tiny") },
  responses: { model: openai.responses("tiny"), providerOptions: { openai: { store: false, include: ["reasoning.encrypted_content"] } } },
  messages: { model: createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })("tiny"), providerOptions: thinking, maxOutputTokens: 4000 },
};
let ran = 0;
const counted = (run) => async (input) => {
  ran += 1;
  return run(input);
};
const tools = {
  weather: tool({
    description: "Say the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: counted(({ city }) => `sunny in ${city}`),
  }),
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: counted(({ a, b }) => String(a + b)),
  }),
  search: tool({
    description: "Search notes.",
    inputSchema: z.object({ query: z.string(), limit: z.number().optional(), tags: z.array(z.string()).optional() }),
    execute: counted(() => ""),
  }),
};

async function streamed(options) {
  let failed;
  const result = streamText({ ...options, onError: ({ error }) => (failed = error) });
  await result.consumeStream();
  if (failed) throw failed;
  return await result.text;
}

const found = {};
for (const [kind, options] of Object.entries(models)) {
  for (const how of ["whole", "streamed"]) {
    ran = 0;
    const asked = { ...options, prompt: "Do the ten steps.", tools, maxRetries: 0, stopWhen: stepCountIs(20) };
    const text = how === "whole" ? (await generateText(asked)).text : await streamed(asked);
    found[`${kind} ${how}`] = [text, ran];
  }
}
console.log(JSON.stringify(found));
