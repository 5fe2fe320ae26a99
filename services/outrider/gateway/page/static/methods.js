// The methods of speculation, as the page shows them.

/** Names of the colours of methods in the style sheet; all that `auto` never chooses share one. */
export const METHOD_FAMILIES = /** @type {Record<string, string>} */ ({
  off: "target",
  "best-first": "draft",
  pearl: "wire",
  saguaro: "grammar",
  double: "wait",
  retrieval: "retrieval",
  other: "other",
});

const MEANINGS = new Map([
  ["off", "no guesses: the model writes alone"],
  ["speculative", "the draft model guesses a chain, and the model waits for it"],
  ["pearl", "the draft model goes on with its chain while the model checks"],
  ["card", "a beam: the best guesses of each step"],
  ["saguaro", "a chain, and more chains for the likely outcomes of its check"],
  ["double", "the draft model checks phrases that were found in earlier text"],
  ["best-first", "the most probable guesses anywhere in the tree"],
  ["opt-tree", "after each check the tree with the most probable paths"],
  ["sequoia", "after each check a tree shaped by how often guesses were right"],
  ["retrieval", "no draft model: phrases found in earlier text"],
  ["spacelike", "no draft model: what followed the longest same beginning"],
]);

/**
 * Returns the family of a method, by which it is coloured.
 * @param {string} method
 * @returns {string}
 */
export function familyOfMethod(method) {
  return method in METHOD_FAMILIES ? method : "other";
}

/**
 * Returns a method in words.
 * @param {string} method
 * @returns {string}
 */
export function meaningOfMethod(method) {
  return MEANINGS.get(method) ?? method;
}
