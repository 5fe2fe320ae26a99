// What one lane of the race has come to, and how two lanes compare. No DOM: a stream and a recording fill it alike.

import { chunkOf } from "./api.js";
import { TextCutter } from "./cutting.js";
import { familyOf } from "./sources.js";

/**
 * @typedef {object} Token
 * @property {number} id
 * @property {string | null} source
 * @property {string} text - Empty for a token whose bytes do not finish a character.
 * @property {number} round - Index of its round.
 * @property {number | null} logprob
 * @property {[string, number][]} top - The most probable tokens at its place, and their log-probabilities.
 */

/**
 * @typedef {object} Round
 * @property {string} method
 * @property {number} numDrafted
 * @property {number} numAccepted
 * @property {number} numRows
 * @property {number} firstToken
 * @property {number} numTokens
 * @property {any} times
 * @property {any} tree
 * @property {number} atMs - When its tokens arrived, since the lane's start.
 */

/** A generation as the page has seen it so far. */
export class Lane {
  /** @param {string} method - What was asked for. */
  constructor(method) {
    this.method = method;
    this.text = "";
    this.tokens = /** @type {Token[]} */ ([]);
    this.rounds = /** @type {Round[]} */ ([]);
    /** When tokens arrived, in milliseconds since the start, and how many there were then. */
    this.arrivals = /** @type {[number, number][]} */ ([]);
    /** Tokens by family of sources. */
    this.counts = /** @type {Map<string, number>} */ (new Map());
    this.elapsedMs = 0;
    this.firstMs = /** @type {number | null} */ (null);
    this.finishReason = /** @type {string | null} */ (null);
    this.summary = /** @type {any} */ (null);
    /** Tokens whose text or place is new since `takeNews`. */
    this.pieces = /** @type {import("./cutting.js").Piece[]} */ ([]);
    this.#cutter = new TextCutter();
  }

  #cutter;

  /**
   * Takes an event of the stream.
   * @param {any} event
   * @param {number} atMs - When it arrived, since the start of the lane.
   */
  take(event, atMs) {
    const chunk = chunkOf(event);
    this.summary = chunk.summary ?? this.summary;
    this.finishReason = chunk.finishReason ?? this.finishReason;
    if (chunk.tokenIds.length || chunk.text) {
      this.elapsedMs = atMs;
      this.firstMs ??= atMs;
    }
    const firstToken = this.tokens.length;
    chunk.tokenIds.forEach((id, index) => {
      const source = chunk.sources[index] ?? null;
      const probability = chunk.logprobs[index];
      this.tokens.push({
        id,
        source,
        text: "",
        round: this.rounds.length,
        logprob: probability?.logprob ?? null,
        top: probability?.top ?? [],
      });
      const family = familyOf(source);
      this.counts.set(family, (this.counts.get(family) ?? 0) + 1);
    });
    if (chunk.tokenIds.length) this.arrivals.push([atMs, this.tokens.length]);
    this.text += chunk.text;
    for (const piece of this.#cutter.push(chunk.text, chunk.textEnds, chunk.tokenIds.length)) {
      if (this.tokens[piece.token]) this.tokens[piece.token].text += piece.text;
      this.pieces.push(piece);
    }
    if (chunk.round) this.#takeRound(chunk, firstToken, atMs);
  }

  /**
   * @param {import("./api.js").Chunk} chunk
   * @param {number} firstToken
   * @param {number} atMs
   */
  #takeRound(chunk, firstToken, atMs) {
    const round = /** @type {any} */ (chunk.round);
    this.rounds.push({
      method: round.method ?? this.method,
      numDrafted: round.num_drafted ?? 0,
      numAccepted: round.num_accepted ?? 0,
      numRows: round.num_forward_rows ?? 0,
      firstToken,
      numTokens: chunk.tokenIds.length,
      times: round.times ?? {},
      tree: chunk.tree,
      atMs,
    });
  }

  /** @returns {import("./cutting.js").Piece[]} The pieces of text since the last call. */
  takeNews() {
    const pieces = this.pieces;
    this.pieces = [];
    return pieces;
  }

  /** @returns {number} Tokens per second since the request was sent. */
  get tokensPerSecond() {
    return this.elapsedMs > 0 ? (1000 * this.tokens.length) / this.elapsedMs : 0;
  }

  /** @returns {{perForward: number, kept: number | null, numDrafted: number}} */
  get totals() {
    let numDrafted = 0;
    let numAccepted = 0;
    for (const round of this.rounds) {
      numDrafted += round.numDrafted;
      numAccepted += round.numAccepted;
    }
    return {
      perForward: this.rounds.length ? this.tokens.length / this.rounds.length : 0,
      kept: numDrafted ? numAccepted / numDrafted : null,
      numDrafted,
    };
  }

  /** @returns {[string, number][]} Methods that rounds were drafted by, and how many rounds; the most frequent first. */
  get choices() {
    const counts = /** @type {Map<string, number>} */ (new Map());
    for (const round of this.rounds) counts.set(round.method, (counts.get(round.method) ?? 0) + 1);
    return [...counts].sort((left, right) => right[1] - left[1]);
  }

  /**
   * @param {string} name - Of a time in `times`.
   * @param {boolean} [isOfSome] - Whether rounds without it are left out.
   * @returns {number} Its median over the rounds, in milliseconds.
   */
  median(name, isOfSome = false) {
    const all = this.rounds.map((round) => round.times[name] ?? 0);
    const times = (isOfSome ? all.filter((time) => time > 0) : all).sort((left, right) => left - right);
    return times.length ? times[Math.floor(times.length / 2)] : 0;
  }

  /**
   * @returns {any} Medians of the times of drafts that were waited for, which come with the last event; null before, and
   * where there were none. They stand in for the times of rounds, which old recordings do not have.
   */
  get draftTimes() {
    const times = this.summary?.times_p50;
    return times?.draft_latency_ms > 0
      ? { draft_latency_ms: times.draft_latency_ms, draft_forward_ms: Math.min(times.draft_latency_ms, times.draft_forward_ms) }
      : null;
  }
}

/** Compares two lanes token by token, as they grow. */
export class Comparison {
  #numCompared = 0;
  /** Index of the first token that differs. */
  differsAt = /** @type {number | null} */ (null);

  /**
   * @param {Lane} left
   * @param {Lane} right
   * @returns {{numSame: number, numCompared: number, differsAt: number | null}}
   */
  update(left, right) {
    const end = Math.min(left.tokens.length, right.tokens.length);
    while (this.differsAt === null && this.#numCompared < end) {
      if (left.tokens[this.#numCompared].id !== right.tokens[this.#numCompared].id) this.differsAt = this.#numCompared;
      else this.#numCompared++;
    }
    return { numSame: this.#numCompared, numCompared: end, differsAt: this.differsAt };
  }
}

/**
 * Says how the race ended.
 * @param {Lane} left
 * @param {Lane} right
 * @param {{isAtOnce: boolean, isStopped: boolean, dtype: string}} how
 * @returns {{headline: string, detail: string, kind: "same" | "differs" | "open"}}
 */
export function verdict(left, right, how) {
  const { numSame, differsAt } = new Comparison().update(left, right);
  const speeds = [left, right].map((lane) => `${lane.method} ${lane.tokensPerSecond.toFixed(0)}`).join(", ");
  const clock = `Tokens a second, by this page's clock: ${speeds}${how.isAtOnce ? "; both ran at once and shared the server" : ""}.`;
  if (differsAt !== null) {
    return {
      kind: "differs",
      headline: `The texts part at token ${differsAt + 1}.`,
      detail: `${whyTheyPart(left, differsAt, how.dtype)} ${clock}`,
    };
  }
  const isWhole = left.finishReason !== null && right.finishReason !== null;
  if (how.isStopped || !isWhole || left.tokens.length !== right.tokens.length) {
    return {
      kind: "open",
      headline: numSame ? `The same text so far: ${numSame} tokens.` : "Stopped before both had text.",
      detail: isWhole ? `One has ${left.tokens.length} tokens, the other ${right.tokens.length}. ${clock}` : clock,
    };
  }
  const ratio = left.elapsedMs / right.elapsedMs;
  const factor = ratio >= 1 ? ratio : 1 / ratio;
  const speed =
    factor < 1.05 ? "as fast as the other" : ratio >= 1 ? `${factor.toFixed(1)} times as fast` : `${factor.toFixed(1)} times as slow`;
  return {
    kind: "same",
    headline: `The same text, ${speed}.`,
    detail: `All ${numSame} tokens compared, one by one. ${clock}`,
  };
}

/**
 * @param {Lane} lane
 * @param {number} index
 * @param {string} dtype
 * @returns {string}
 */
function whyTheyPart(lane, index, dtype) {
  const [first, second] = lane.tokens[index].top;
  const gap = first && second ? Math.abs(Math.exp(first[1]) - Math.exp(second[1])) : null;
  const near = gap === null ? "" : ` The two most probable tokens there are ${(100 * gap).toFixed(1)} points of probability apart.`;
  const numerics =
    dtype && dtype !== "float32"
      ? `This server computes in ${dtype}, where a token computed alone and among others is rounded differently: that can flip a near-tie. In float32 texts are equal.`
      : "Two servers, or another build of one, may round differently, which can flip a near-tie.";
  return `${numerics}${near}`;
}
