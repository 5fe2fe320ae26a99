// The text of a lane on the page: a span for each token, coloured by where it came from.

import { visible } from "./cutting.js";
import { familyOf, meaningOf } from "./sources.js";
import { percent } from "./tree.js";

/** Shows a lane's text, and tells what is known of the token under the pointer or the cursor. */
export class TextView {
  #spans = /** @type {HTMLElement[]} */ ([]);
  #current = -1;

  /**
   * @param {HTMLElement} box - Scrolls; takes the arrow keys.
   * @param {HTMLElement} card - Where a token's details are shown.
   * @param {(round: number) => void} onRound - Called with the round of a token that was chosen.
   */
  constructor(box, card, onRound) {
    this.box = box;
    this.card = card;
    this.onRound = onRound;
    this.lane = /** @type {import("./lane.js").Lane | null} */ (null);
    box.addEventListener("pointerover", (event) => this.#point(event.target));
    box.addEventListener("pointerleave", () => this.#show(-1));
    box.addEventListener("blur", () => this.#show(-1));
    box.addEventListener("click", (event) => {
      this.#point(event.target);
      this.#choose();
    });
    box.addEventListener("keydown", (event) => this.#press(event));
  }

  /** @param {import("./lane.js").Lane} lane */
  begin(lane) {
    this.lane = lane;
    this.#spans = [];
    this.#show(-1);
    this.box.replaceChildren();
  }

  /** Appends what is new, and goes on scrolling if the end was in view. */
  update() {
    if (!this.lane) return;
    const { box, lane } = this;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const news = document.createDocumentFragment();
    while (this.#spans.length < lane.tokens.length) {
      const span = document.createElement("span");
      span.className = `token from-${familyOf(lane.tokens[this.#spans.length].source)}`;
      span.dataset.token = String(this.#spans.length);
      this.#spans.push(span);
      news.append(span);
    }
    for (const piece of lane.takeNews()) {
      const span = this.#spans[piece.token];
      if (span) span.textContent += piece.text;
      else news.append(piece.text);
    }
    box.append(news);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  /** @param {number} token - The first that differs. */
  markDifference(token) {
    this.#spans[token]?.classList.add("differs");
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const token = target instanceof HTMLElement ? target.dataset.token : undefined;
    if (token !== undefined) this.#show(Number(token));
  }

  #choose() {
    if (this.lane && this.#current >= 0) this.onRound(this.lane.tokens[this.#current].round);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const steps = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity });
    if (event.key === "Enter") this.#choose();
    else if (event.key === "Escape") this.#show(-1);
    else if (event.key in steps) {
      this.#show(Math.max(0, Math.min(this.#spans.length - 1, this.#current + steps[event.key])));
      this.#spans[this.#current]?.scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
  }

  /** @param {number} index */
  #show(index) {
    this.#spans[this.#current]?.classList.remove("current");
    this.#current = index;
    const span = this.#spans[index];
    const token = this.lane?.tokens[index];
    this.card.hidden = !span || !token;
    if (!span || !token) return;
    span.classList.add("current");
    const lines = [
      `“${visible(token.text) || "∅"}”`,
      `from ${meaningOf(token.source)}, in round ${token.round + 1}`,
      token.logprob === null ? "" : `probability ${percent(Math.exp(token.logprob))}, log-probability ${token.logprob.toFixed(3)}`,
      token.top.length ? `most probable: ${token.top.map(([text, logprob]) => `${visible(text)} ${percent(Math.exp(logprob))}`).join(", ")}` : "",
    ];
    this.card.replaceChildren(
      ...lines.filter(Boolean).map((line) => {
        const row = document.createElement("p");
        row.textContent = line;
        return row;
      }),
    );
    const place = span.getBoundingClientRect();
    const width = this.card.offsetWidth;
    this.card.style.left = `${Math.max(8, Math.min(window.innerWidth - width - 8, place.left))}px`;
    this.card.style.top = `${place.bottom + 8 + this.card.offsetHeight > window.innerHeight ? place.top - this.card.offsetHeight - 8 : place.bottom + 8}px`;
  }
}
