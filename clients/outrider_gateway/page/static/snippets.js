// The request on the page as code.

/**
 * @param {{path: string, body: any}} request
 * @param {string} origin
 * @returns {string} A line for a shell.
 */
export function curl(request, origin) {
  const body = JSON.stringify(request.body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}${request.path} -H 'Content-Type: application/json' -d '${body}'`;
}

/**
 * @param {{path: string, body: any}} request
 * @param {string} origin
 * @returns {string} Python, for the openai package.
 */
export function python(request, origin) {
  const { speculation, ...body } = request.body;
  const isChat = "messages" in body;
  const lines = Object.entries(body).map(([key, value]) => `    ${key}=${literal(value)},`);
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key="none")`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    `    extra_body={"speculation": ${literal(speculation)}},`,
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    `        print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)`,
  ].join("\n");
}

/** @param {any} value @returns {string} */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${literal(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}
