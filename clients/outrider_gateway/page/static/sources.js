// Where a token came from, as the page shows it: many sources of the API, a few colours.

/**
 * @typedef {object} Family
 * @property {string} id - Part of class names: `from-draft`.
 * @property {string} label - Its name in the legend.
 * @property {string} meaning - The same in words.
 */

/** @type {Family[]} In the order of the legend. */
export const FAMILIES = [
  { id: "target", label: "target", meaning: "drawn by the model itself" },
  { id: "draft", label: "draft", meaning: "guessed by the draft model, and kept" },
  { id: "retrieval", label: "retrieval", meaning: "found in earlier text, and kept" },
  { id: "grammar", label: "grammar", meaning: "what the grammar leaves no choice about" },
  { id: "prediction", label: "prediction", meaning: "found in the prediction of the request" },
  { id: "other", label: "other", meaning: "guessed in another way" },
];

/** Families and meanings by the sources' names in the API. */
const SOURCES = new Map([
  ["target", ["target", "the model itself"]],
  ["draft", ["draft", "the draft model"]],
  ["prior", ["retrieval", "retrieval: a corpus built before"]],
  ["dynamic", ["retrieval", "retrieval: this session's own text"]],
  ["shared", ["retrieval", "retrieval: other sessions' text"]],
  ["rejected", ["retrieval", "retrieval: guesses that were refused before"]],
  ["ring", ["retrieval", "retrieval: prompts and outputs of finished sessions"]],
  ["recycled", ["retrieval", "retrieval: what the model found probable before"]],
  ["pool", ["retrieval", "retrieval: the session's pool of phrases"]],
  ["grammar", ["grammar", "the grammar"]],
  ["prediction", ["prediction", "the prediction of the request"]],
  ["random", ["other", "random tokens"]],
]);

/**
 * Returns the family of a source; a token that names none is the target's own.
 * @param {string | null | undefined} source
 * @returns {string}
 */
export function familyOf(source) {
  return source ? (SOURCES.get(source)?.[0] ?? "other") : "target";
}

/**
 * Returns a source in words.
 * @param {string | null | undefined} source
 * @returns {string}
 */
export function meaningOf(source) {
  return source ? (SOURCES.get(source)?.[1] ?? source) : "the model itself";
}
