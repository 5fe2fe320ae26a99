// A client that shares no code with Outrider: grpc-js reads the protos and streams a generation.
// Prints one JSON object: {"health": ..., "tokenIds": [...], "text": ..., "reason": ...}.
const [address, protos, prompt] = process.argv.slice(2);
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

const load = (file) => grpc.loadPackageDefinition(loadSync(file, { includeDirs: [protos], longs: String, enums: String }));
const { VerifierService } = load("outrider/v1/verifier.proto").outrider.v1;
const { Health } = load("grpc_health.proto").grpc.health.v1;
const credentials = grpc.credentials.createInsecure();
const result = { tokenIds: [], text: "" };

new Health(address, credentials).Check({ service: "outrider.v1.VerifierService" }, (error, response) => {
  result.health = error ? String(error) : response.status;
  const request = {
    prompt: { text: prompt },
    sampling: { temperature: 0, maxTokens: 16, ignoreEos: true },
    speculation: { method: "METHOD_PEARL" },
  };
  const call = new VerifierService(address, credentials).Generate(request);
  call.on("data", (response) => {
    if (response.chunk) {
      result.tokenIds.push(...response.chunk.tokenIds);
      result.text += response.chunk.text;
    }
    if (response.finished) result.reason = response.finished.reason;
  });
  call.on("error", (error) => { result.error = String(error); });
  call.on("status", () => { console.log(JSON.stringify(result)); process.exit(0); });
});
