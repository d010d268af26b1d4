// What users of the AI SDK do: text, streams, tools in steps, objects; over both of our surfaces.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.GRAFT_URL + "/v1";
const compatible = createOpenAICompatible({ name: "graft", baseURL, includeUsage: true });
const official = createOpenAI({ baseURL, apiKey: "none" });
const add_to = tool({
  description: "Adds one.",
  inputSchema: z.object({ number: z.number().int() }),
  execute: async ({ number }) => number + 1,
});

for (const model of [compatible("tiny"), official.chat("tiny"), official.responses("tiny")]) {
  const whole = await generateText({ model, prompt: "hello", maxRetries: 0 });
  assert.ok(whole.text.endsWith("😀"));
  assert.equal(whole.finishReason, "stop");

  const stream = streamText({ model, prompt: "hello", maxRetries: 0 });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, "stop");
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

  for (const ask of [generateText, streamText]) {
    const done = await ask({
      model,
      prompt: "add_to 41 please",
      tools: { add_to },
      stopWhen: stepCountIs(3),
      maxRetries: 0,
    });
    const steps = await done.steps;
    assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ number: 41 }]);
    assert.deepEqual(steps[0].toolResults.map((result) => result.output), [42]);
    assert.equal(steps[0].finishReason, "tool-calls");
    assert.equal(await done.text, whole.text);
  }
  await assert.rejects(
    generateText({ model, prompt: "hello", temperature: -1, maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 400,
  );
}
console.log("the AI SDK is content");
