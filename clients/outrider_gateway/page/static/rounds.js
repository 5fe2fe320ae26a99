// A chart of a lane's rounds, on canvas: what was kept and refused, and by which method it was guessed.

import { colourOfMethod } from "./methods.js";
import { FAMILIES, familyOf } from "./sources.js";

const [NARROWEST, WIDEST] = [8, 22];
const BAND = 16;

/**
 * @param {number} numRounds
 * @param {number} numShown
 * @param {number} selected
 * @returns {number} The first round to show, such that the selected one is among them.
 */
export function firstShown(numRounds, numShown, selected) {
  const last = Math.max(0, numRounds - numShown);
  return Math.max(0, Math.min(last, selected - Math.floor(numShown / 2)));
}

/**
 * Makes a canvas as sharp as the screen.
 * @param {HTMLCanvasElement} canvas
 * @returns {{context: CanvasRenderingContext2D, width: number, height: number, colour: (name: string) => string}}
 */
export function prepared(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const style = getComputedStyle(canvas);
  context.font = `12px ${style.fontFamily}`;
  return { context, width, height, colour: (name) => style.getPropertyValue(`--${name}`).trim() };
}

/**
 * Returns runs of rounds with one method.
 * @param {{method: string}[]} rounds
 * @returns {{method: string, from: number, to: number}[]} From the first round to the one after the last.
 */
export function runsOf(rounds) {
  const runs = /** @type {{method: string, from: number, to: number}[]} */ ([]);
  rounds.forEach(({ method }, index) => {
    const last = runs.at(-1);
    if (last?.method === method) last.to = index + 1;
    else runs.push({ method, from: index, to: index + 1 });
  });
  return runs;
}

/**
 * Draws a bar for each round: up what was kept, by source, and the model's own token; down what was refused; and below
 * all a band with the method.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./lane.js").Lane} lane
 * @param {number} selected - Index of a round.
 * @returns {{first: number, width: number}} Which round stands at the left, and how wide one is: to find what was clicked.
 */
export function drawBars(canvas, lane, selected) {
  const { context, width, height, colour } = prepared(canvas);
  const step = Math.max(NARROWEST, Math.min(WIDEST, Math.floor(width / Math.max(1, lane.rounds.length))));
  const bar = step - 2;
  const numShown = Math.floor(width / step);
  const first = firstShown(lane.rounds.length, numShown, selected);
  const shown = lane.rounds.slice(first, first + numShown);
  const up = Math.max(4, ...shown.map((round) => round.numTokens));
  const down = Math.max(2, ...shown.map((round) => round.numDrafted - round.numAccepted));
  const unit = Math.min(14, (height - BAND - 8) / (up + down));
  const base = 2 + unit * up;
  shown.forEach((round, index) => {
    const x = index * step;
    if (first + index === selected) {
      context.fillStyle = colour("wash");
      context.fillRect(x - 1, 0, step, height);
    }
    let y = base;
    const tokens = lane.tokens.slice(round.firstToken, round.firstToken + round.numTokens);
    for (const family of FAMILIES.slice(1).concat(FAMILIES[0])) {
      const count = tokens.filter((token) => familyOf(token.source) === family.id).length;
      context.fillStyle = colour(family.id);
      context.fillRect(x, y - unit * count, bar, Math.max(0, unit * count - 1));
      y -= unit * count;
    }
    context.fillStyle = colour("refused");
    context.fillRect(x, base + 2, bar, Math.max(0, unit * (round.numDrafted - round.numAccepted) - 2));
  });
  context.fillStyle = colour("line");
  context.fillRect(0, base, width, 1);
  for (const { method, from, to } of runsOf(shown)) {
    const [x, runWidth] = [from * step, (to - from) * step - 2];
    context.fillStyle = colour(colourOfMethod(method));
    context.fillRect(x, height - 4, runWidth, 4);
    context.fillStyle = colour("muted");
    if (context.measureText(method).width <= runWidth) context.fillText(method, x, height - 8);
  }
  return { first, width: step };
}
