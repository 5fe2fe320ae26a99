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

const FAMILY_OF = new Map([
  ["target", "target"],
  ["draft", "draft"],
  ["grammar", "grammar"],
  ["prediction", "prediction"],
  ...["prior", "dynamic", "shared", "rejected", "ring", "recycled", "pool"].map((name) => [name, "retrieval"]),
]);

const MEANINGS = new Map([
  ["target", "the model itself"],
  ["draft", "the draft model"],
  ["prior", "retrieval: a corpus built before"],
  ["dynamic", "retrieval: this session's own text"],
  ["shared", "retrieval: other sessions' text"],
  ["rejected", "retrieval: guesses that were refused before"],
  ["ring", "retrieval: prompts and outputs of finished sessions"],
  ["recycled", "retrieval: what the model found probable before"],
  ["pool", "retrieval: the session's pool of phrases"],
  ["grammar", "the grammar"],
  ["prediction", "the prediction of the request"],
  ["random", "random tokens"],
]);

/**
 * Returns the family of a source; a token that names none is the target's own.
 * @param {string | null | undefined} source
 * @returns {string}
 */
export function familyOf(source) {
  return source ? (FAMILY_OF.get(source) ?? "other") : "target";
}

/**
 * Returns a source in words.
 * @param {string | null | undefined} source
 * @returns {string}
 */
export function meaningOf(source) {
  return source ? (MEANINGS.get(source) ?? source) : "the model itself";
}
