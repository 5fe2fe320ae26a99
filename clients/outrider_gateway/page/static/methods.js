// The methods of speculation, as the page shows them.

/** @type {Map<string, {meaning: string, colour: string}>} In the order in which users choose among them. */
const METHODS = new Map();

/** Learns the methods from the gateway, or from the page itself if that is a single file. */
export async function learnMethods() {
  const held = document.getElementById("methods");
  const found = held ? JSON.parse(held.textContent ?? "") : await (await fetch("/page/methods.json")).json();
  for (const { name, meaning, colour } of found) METHODS.set(name, { meaning, colour });
}

/** @returns {string[]} */
export function methodNames() {
  return [...METHODS.keys()];
}

/**
 * Returns the name of a method's colour in the style sheet.
 * @param {string} method
 * @returns {string}
 */
export function colourOfMethod(method) {
  return METHODS.get(method)?.colour ?? "other";
}

/**
 * Returns a method in words.
 * @param {string} method
 * @returns {string}
 */
export function meaningOfMethod(method) {
  return METHODS.get(method)?.meaning ?? method;
}
