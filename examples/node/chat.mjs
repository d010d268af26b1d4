// A chat over gRPC, whole and as a stream, from the proto files of this repository.
import path from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.env.GRAFT_GRPC ?? "127.0.0.1:8001";
const protos = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../protos");
const definition = await loader.load("graft/v1/gateway.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { graft } = grpc.loadPackageDefinition(definition);
const client = new graft.v1.GatewayService(address, grpc.credentials.createInsecure());

const request = {
  messages: [{ role: "user", content: "Why is the sky blue?" }],
  options: { max_tokens: 24, temperature: 0, speculation_mode: "auto" },
};
const deadline = () => ({ deadline: Date.now() + 60_000 });

const { answer } = await new Promise((resolve, reject) =>
  client.Chat(request, deadline(), (error, reply) => (error ? reject(error) : resolve(reply))),
);
console.log("answer:", answer.choices[0].text);

let text = "";
for await (const { event } of client.ChatStream(request, deadline())) {
  if (event.event === "delta") text += event.delta.text;
  if (event.event === "completed") {
    const { round_count, accept_length } = event.completed.speculation;
    console.log("stream:", text);
    console.log(`rounds: ${round_count}, tokens a round: ${accept_length.toFixed(2)}`);
  }
}

await new Promise((resolve) =>
  client.Chat({ ...request, options: { temperature: -1 } }, deadline(), (error) => {
    console.log("refused:", grpc.status[error.code], error.details);
    resolve();
  }),
);
client.close();
