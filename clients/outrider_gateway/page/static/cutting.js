// Text cut into tokens. Ends are code points; a JavaScript string counts UTF-16 units.

/**
 * @typedef {object} Piece - Text of one token; a token may get its text in several pieces.
 * @property {number} token - Index of the token in the output.
 * @property {string} text
 */

/** Gives the text of a stream to its tokens. Joined, the pieces are always the whole text. */
export class TextCutter {
  #ends = /** @type {number[]} */ ([]);
  #length = 0;
  #token = 0;

  /**
   * Takes one chunk; returns its text in pieces, in order.
   *
   * An end may lie after the text so far, as text that may become a stop string is held back: the token gets what there
   * is, and more later. Text after the last end belongs to the last token.
   * @param {string} text
   * @param {number[]} ends - Of the chunk's tokens, in the whole text.
   * @param {number} numTokens - How many tokens the chunk has; without ends, all its text goes to the last of them.
   * @returns {Piece[]}
   */
  push(text, ends, numTokens = ends.length) {
    const points = Array.from(text);
    const from = this.#length;
    const to = from + points.length;
    for (let index = 0; index < numTokens; index++) {
      this.#ends.push(ends[index] ?? (index < numTokens - 1 ? from : to));
    }
    /** @type {Piece[]} */
    const pieces = [];
    while (this.#length < to) {
      while (this.#token < this.#ends.length - 1 && this.#ends[this.#token] <= this.#length) this.#token++;
      const isLast = this.#token >= this.#ends.length - 1;
      const end = isLast ? to : Math.min(this.#ends[this.#token], to);
      pieces.push({ token: this.#token, text: points.slice(this.#length - from, end - from).join("") });
      this.#length = end;
    }
    return pieces;
  }
}

/**
 * Makes white space visible.
 * @param {string} text
 * @returns {string}
 */
export function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll("\r", "␍");
}

/**
 * Shortens a text to so many code points.
 * @param {string} text
 * @param {number} length
 * @returns {string}
 */
export function shortened(text, length) {
  const points = Array.from(text);
  return points.length <= length ? text : `${points.slice(0, length - 1).join("")}…`;
}
