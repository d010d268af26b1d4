// Speaks to the gateway this page came from. Knows the key and the stream's form, nothing else.

const BASE = new URL("../", import.meta.url);
const KEY = "graft-api-key";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

function headers(extra = {}) {
  const found = { ...extra };
  if (key.get()) found.authorization = `Bearer ${key.get()}`;
  return found;
}

async function refuse(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The status says enough.
  }
  throw new Refused(message, response.status);
}

export async function get(path) {
  const response = await fetch(new URL(path, BASE), { headers: headers() });
  if (!response.ok && response.status !== 503) await refuse(response);
  return response.json();
}

// Yields the objects of a streamed answer; an error inside the stream is thrown.
export async function* stream(path, body, signal) {
  const response = await fetch(new URL(path, BASE), {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) await refuse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let done = false;
  for (;;) {
    const part = await reader.read();
    if (part.done) break;
    text += part.value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const content = event.slice("data: ".length);
      if (content === "[DONE]") {
        done = true;
        continue;
      }
      const chunk = JSON.parse(content);
      if (chunk.error) throw new Refused(chunk.error.message, 0);
      yield chunk;
    }
  }
  if (!done) throw new Refused("the server ended the answer early", 0);
}
