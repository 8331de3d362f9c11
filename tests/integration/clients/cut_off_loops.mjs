// Tool loops of the Vercel AI SDK against a server: BASE MODEL. Each loop's first call of a tool is cut off by a limit of
// tokens. The loop sends it back, with all that it has received, and goes on. Prints the number of steps of each loop.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [base, name] = process.argv.slice(2);
const CUT_OFF = 22; // tokens: less than a call with its arguments has
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const models = {
  chat: openai.chat(name),
  responses: openai.responses(name),
  compatible: createOpenAICompatible({ name: "forebay", baseURL: `${base}/v1` })(name),
  anthropic: createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" })(name),
};
const tools = {
  get_weather: tool({
    description: "Say the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `It is sunny in ${city}.`,
  }),
};

async function whole(options) {
  const result = await generateText(options);
  return { messages: result.response.messages, steps: result.steps.length };
}

async function streamed(options) {
  let failed;
  const result = streamText({ ...options, onError: ({ error }) => (failed = error) });
  await result.consumeStream();
  if (failed) throw failed;
  return { messages: (await result.response).messages, steps: (await result.steps).length };
}

const found = {};
for (const [kind, model] of Object.entries(models)) {
  for (const [how, ask] of Object.entries({ whole, streamed })) {
    const messages = [{ role: "user", content: "How is the weather in Paris?" }];
    let steps = 0;
    for (const [maxOutputTokens, toolChoice] of [
      [CUT_OFF, "required"],
      [120, "required"],
      [60, "none"],
    ]) {
      const options = { model, messages, tools, toolChoice, maxOutputTokens, temperature: 0, maxRetries: 0 };
      const answer = await ask({ ...options, stopWhen: stepCountIs(2) });
      messages.push(...answer.messages, { role: "user", content: "And now?" });
      steps += answer.steps;
    }
    found[`${kind} ${how}`] = steps;
  }
}
console.log(JSON.stringify(found));
