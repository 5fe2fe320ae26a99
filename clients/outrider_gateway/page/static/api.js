// The gateway's API: requests as the page makes them, server-sent events, errors in words.

/**
 * @typedef {object} Settings
 * @property {string} prompt
 * @property {boolean} isChat - Whether the prompt is a user's message.
 * @property {{role: string, content: string}[]} turns - What was said before it, in a chat.
 * @property {boolean} isJson - Whether the answer is to be a JSON object, in a chat.
 * @property {number} temperature
 * @property {number} seed
 * @property {number} maxTokens
 * @property {string} model
 */

/**
 * @typedef {object} Chunk - One event of a stream, as the page needs it.
 * @property {string} text
 * @property {number[]} tokenIds
 * @property {number[]} textEnds - Where the text of each token ends in the whole text, in code points.
 * @property {(string | null)[]} sources
 * @property {{logprob: number, top: [string, number][]}[]} logprobs - One for each token, or none.
 * @property {object | null} round
 * @property {object | null} tree
 * @property {string | null} finishReason
 * @property {object | null} summary - What speculation did, in the last event.
 */

export const NUM_ALTERNATIVES = 4;

/** An answer of the server that is an error. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {string | null} param - The field that is wrong.
   */
  constructor(message, param = null) {
    super(message);
    this.name = "ApiError";
    this.param = param;
  }
}

/** Cuts a stream of text into the data of server-sent events. Comments and other fields are dropped. */
export class EventParser {
  #rest = "";
  #data = /** @type {string[]} */ ([]);

  /**
   * Takes a piece of the stream, cut anywhere; returns the data of the events that it completes.
   * @param {string} text
   * @returns {string[]}
   */
  push(text) {
    this.#rest += text;
    const events = [];
    for (;;) {
      const end = this.#rest.search(/[\r\n]/);
      // A CR at the very end may be half of a CR LF.
      if (end < 0 || (this.#rest[end] === "\r" && end + 1 === this.#rest.length)) return events;
      const line = this.#rest.slice(0, end);
      this.#rest = this.#rest.slice(end + (this.#rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  }
}

/**
 * Returns path and body of the request for one lane.
 * @param {Settings} settings
 * @param {string} method - How it is speculated.
 * @param {string[]} report - What is reported besides the text.
 * @returns {{path: string, body: object}}
 */
export function requestOf(settings, method, report = ["sources", "rounds", "trees"]) {
  const prompt = settings.isChat
    ? { messages: [...settings.turns, { role: "user", content: settings.prompt }], ...(settings.isJson ? { response_format: { type: "json_object" } } : {}) }
    : { prompt: settings.prompt };
  const logprobs = settings.isChat
    ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES }
    : { logprobs: NUM_ALTERNATIVES };
  return {
    path: settings.isChat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      model: settings.model,
      ...prompt,
      max_tokens: settings.maxTokens,
      temperature: settings.temperature,
      seed: settings.seed,
      stream: true,
      stream_options: { include_usage: true },
      ...(report.length ? logprobs : {}),
      speculation: { method },
      ...(report.length ? { speculation_report: report } : {}),
    },
  };
}

/**
 * Reads the events of a generation as they come.
 * @param {{path: string, body: object}} request
 * @param {{token?: string, signal?: AbortSignal}} options
 * @returns {AsyncGenerator<object>}
 * @throws {ApiError} What the server answers, or that it cannot be reached.
 */
export function generate({ path, body }, options = {}) {
  return events(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) }, options);
}

/**
 * Reads the events of an answer as they come.
 * @param {string} path
 * @param {RequestInit} init
 * @param {{token?: string, signal?: AbortSignal}} options
 * @returns {AsyncGenerator<any>}
 * @throws {ApiError} What the server answers, or that it cannot be reached.
 */
export async function* events(path, init, { token = "", signal } = {}) {
  const headers = { ...init.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...init, headers, signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.");
  });
  if (!response.ok || !response.body) throw await errorOf(response);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError("The connection broke in the middle of the text.");
    });
    if (done) return;
    for (const data of parser.push(value)) {
      // Read on to the end: a stream that is left is a request that failed.
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.param);
      yield event;
    }
  }
}

/**
 * @param {Response} response
 * @returns {Promise<ApiError>}
 */
async function errorOf(response) {
  const error = (await response.json().catch(() => ({}))).error;
  return error?.message
    ? new ApiError(error.message, error.param)
    : new ApiError(`The server answered ${response.status} ${response.statusText}.`);
}

/**
 * Reads an event of either endpoint.
 * @param {any} event
 * @returns {Chunk}
 */
export function chunkOf(event) {
  const choice = event.choices?.[0] ?? {};
  const speculation = choice.speculation ?? {};
  return {
    text: choice.text ?? choice.delta?.content ?? "",
    tokenIds: speculation.token_ids ?? [],
    textEnds: speculation.text_ends ?? [],
    sources: speculation.sources ?? [],
    logprobs: logprobsOf(choice.logprobs),
    round: speculation.round ?? null,
    tree: speculation.tree ?? null,
    finishReason: choice.finish_reason ?? null,
    summary: event.speculation ?? null,
  };
}

/**
 * @param {any} logprobs - Of a completion, or of a chat.
 * @returns {{logprob: number, top: [string, number][]}[]}
 */
function logprobsOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((/** @type {any} */ token) => ({
      logprob: token.logprob,
      top: (token.top_logprobs ?? []).map((/** @type {any} */ other) => [other.token, other.logprob]),
    }));
  }
  return (logprobs.token_logprobs ?? []).map((/** @type {number} */ logprob, /** @type {number} */ index) => ({
    logprob,
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
}
