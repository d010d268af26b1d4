// What users of openai for Node do: chat, streams, the stream helper, tools, responses, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.GRAFT_URL + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tools = [
  {
    type: "function",
    function: {
      name: "add_to",
      parameters: { type: "object", properties: { number: { type: "integer" } } },
    },
  },
];

const whole = await client.chat.completions.create({ model: "tiny", messages });
const text = whole.choices[0].message.content;
assert.ok(text.endsWith("😀"));

let streamed = "";
const stream = await client.chat.completions.create({
  model: "tiny",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const helper = client.chat.completions.stream({ model: "tiny", messages });
const final = await helper.finalChatCompletion();
assert.equal(final.choices[0].message.content, text);

const called = client.chat.completions.stream({
  model: "tiny",
  messages: [{ role: "user", content: "add_to 41 please" }],
  tools,
});
const choice = (await called.finalChatCompletion()).choices[0];
assert.equal(choice.finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(choice.message.tool_calls[0].function.arguments), { number: 41 });

const runner = client.chat.completions.runTools({
  model: "tiny",
  messages: [{ role: "user", content: "add_to 41 please" }],
  tools: [
    {
      type: "function",
      function: { ...tools[0].function, parse: JSON.parse, function: ({ number }) => `${number + 1}` },
    },
  ],
});
assert.equal(await runner.finalContent(), text);

const response = await client.responses.create({ model: "tiny", input: "hello" });
assert.equal(response.output_text, text);
const events = client.responses.stream({ model: "tiny", input: "hello" });
const kinds = [];
for await (const event of events) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");
assert.equal((await events.finalResponse()).output_text, text);

await assert.rejects(
  client.chat.completions.create({ model: "other", messages }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
await assert.rejects(
  client.chat.completions.create({ model: "tiny", messages, temperature: -1 }),
  OpenAI.BadRequestError,
);
const controller = new AbortController();
const cut = await client.chat.completions.create(
  { model: "tiny", messages, stream: true },
  { signal: controller.signal },
);
for await (const _ of cut) controller.abort();
console.log("openai for Node is content");
