// OpenAI's client for Node makes its common calls. Prints one JSON object: what each of them gave.
const [baseURL, model, prompt] = process.argv.slice(2);
const { OpenAI, BadRequestError, NotFoundError } = require("openai");

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tools = [{
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object", properties: { city: { type: "string", enum: ["Rome", "Oslo"] } }, required: ["city"],
      additionalProperties: false,
    },
    strict: true,
  },
}];
const named = { type: "function", function: { name: "weather" } };

async function main() {
  const result = {};
  result.models = (await client.models.list()).data.map((each) => each.id);
  const given = { model, prompt, seed: 5, max_tokens: 20 };
  result.completion = (await client.completions.create(given)).choices[0].text;

  result.chat = "";
  const stream = await client.chat.completions.create({
    model, messages, seed: 7, max_completion_tokens: 20, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    result.chat += chunk.choices[0]?.delta?.content ?? "";
    result.usage = chunk.usage ?? result.usage;
  }

  const called = await client.chat.completions.create({ model, messages, tools, tool_choice: named, seed: 4 });
  result.call = called.choices[0].message.tool_calls[0].function;
  const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: named, seed: 4 });
  result.streamedCall = (await runner.finalMessage()).tool_calls[0].function;

  result.errors = [];
  for (const wrong of [{ temperature: -1 }, { model: "gpt-5" }]) {
    try {
      await client.chat.completions.create({ model, messages, ...wrong });
    } catch (error) {
      const kind = [BadRequestError, NotFoundError].find((each) => error instanceof each);
      result.errors.push({ kind: kind?.name, status: error.status, param: error.param, code: error.code });
    }
  }

  // Leaving the loop ends the generation.
  const endless = await client.completions.create({ model, prompt, stream: true, max_tokens: 2000, ignore_eos: true });
  for await (const chunk of endless) {
    result.first = chunk.choices[0].text;
    break;
  }
  console.log(JSON.stringify(result));
}

main().catch((error) => { console.error(error); process.exit(1); });
