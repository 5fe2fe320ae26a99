// Charts of a lane's rounds, on canvas: what was kept and refused, and where the time went.

import { FAMILIES, familyOf } from "./sources.js";

const BAR = 6;
const NUM_SHOWN = 14;
const TIME_ROWS = [
  ["target", "forward"],
  ["draft", "draft model"],
  ["wire", "wire, queue"],
  ["wait", "waiting"],
];

/**
 * @typedef {object} Span - Of one row of the time chart, in milliseconds from the first round's start.
 * @property {string} row
 * @property {number} from
 * @property {number} to
 */

/**
 * Says where the time of a round goes. What a draft takes beyond its forwards is the wire and the drafter's
 * queue; half of it is drawn before the forwards, half after them.
 * @param {any} times - Of the API.
 * @param {number} start - When the round began.
 * @returns {Span[]}
 */
export function spansOf(times, start) {
  const wait = times.wait_ms ?? 0;
  const forward = times.forward_ms ?? 0;
  const latency = times.draft_latency_ms ?? 0;
  const drafting = Math.min(latency, times.draft_forward_ms ?? 0);
  const way = (latency - drafting) / 2;
  return [
    { row: "wait", from: start, to: start + wait },
    { row: "target", from: start + wait, to: start + wait + forward },
    { row: "wire", from: start, to: start + way },
    { row: "draft", from: start + way, to: start + way + drafting },
    { row: "wire", from: start + way + drafting, to: start + latency },
  ].filter((span) => span.to > span.from);
}

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
function prepared(canvas) {
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
 * Draws a bar for each round: up what was kept, by source, and the model's own token; down what was refused.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./lane.js").Lane} lane
 * @param {number} selected - Index of a round.
 * @returns {{first: number, width: number}} Which round stands at the left, and how wide one is: to find what was clicked.
 */
export function drawBars(canvas, lane, selected) {
  const { context, width, height, colour } = prepared(canvas);
  const numShown = Math.floor(width / (BAR + 2));
  const first = firstShown(lane.rounds.length, numShown, selected);
  const shown = lane.rounds.slice(first, first + numShown);
  const up = Math.max(4, ...shown.map((round) => round.numTokens));
  const down = Math.max(2, ...shown.map((round) => round.numDrafted - round.numAccepted));
  const unit = Math.min(14, (height - 4) / (up + down));
  const base = 2 + unit * up;
  shown.forEach((round, index) => {
    const x = index * (BAR + 2);
    if (first + index === selected) {
      context.fillStyle = colour("wash");
      context.fillRect(x - 1, 0, BAR + 2, height);
    }
    let y = base;
    const tokens = lane.tokens.slice(round.firstToken, round.firstToken + round.numTokens);
    for (const family of FAMILIES.slice(1).concat(FAMILIES[0])) {
      const count = tokens.filter((token) => familyOf(token.source) === family.id).length;
      context.fillStyle = colour(family.id);
      context.fillRect(x, y - unit * count, BAR, Math.max(0, unit * count - 1));
      y -= unit * count;
    }
    context.fillStyle = colour("refused");
    context.fillRect(x, base + 2, BAR, Math.max(0, unit * (round.numDrafted - round.numAccepted) - 2));
  });
  context.fillStyle = colour("line");
  context.fillRect(0, base, width, 1);
  return { first, width: BAR + 2 };
}

/**
 * Draws where the time of some rounds went: one row each for the forward, the draft model, the wire with the queue, and waiting.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./lane.js").Lane} lane
 * @param {number} selected - A round that is among those shown.
 */
export function drawTimes(canvas, lane, selected) {
  const { context, width, height, colour } = prepared(canvas);
  const left = 86;
  const rowHeight = (height - 20) / TIME_ROWS.length;
  const first = firstShown(lane.rounds.length, NUM_SHOWN, selected);
  const shown = lane.rounds.slice(first, first + NUM_SHOWN);
  const total = Math.max(1, shown.reduce((sum, round) => sum + (round.times.round_ms ?? 0), 0));
  const scale = (width - left) / total;
  TIME_ROWS.forEach(([, label], row) => {
    context.fillStyle = colour("muted");
    context.fillText(label, 0, row * rowHeight + rowHeight / 2 + 4);
    context.fillStyle = colour("line");
    context.fillRect(left, (row + 1) * rowHeight - 1, width - left, 1);
  });
  let start = 0;
  shown.forEach((round, index) => {
    const roundWidth = (round.times.round_ms ?? 0) * scale;
    if (first + index === selected) {
      context.fillStyle = colour("wash");
      context.fillRect(left + start * scale, 0, roundWidth, height - 20);
    }
    for (const span of spansOf({ ...round.times, ...(lane.draftTimes ?? {}) }, start)) {
      const row = TIME_ROWS.findIndex(([name]) => name === span.row);
      context.fillStyle = colour(span.row);
      const x = left + span.from * scale;
      context.fillRect(x, row * rowHeight + 6, Math.max(1, Math.min(width - x, (span.to - span.from) * scale - 1)), rowHeight - 13);
    }
    context.fillStyle = colour("line");
    context.fillRect(left + start * scale, 0, 1, height - 20);
    start += round.times.round_ms ?? 0;
  });
  context.fillStyle = colour("muted");
  context.fillText(`${shown.length} rounds, ${total.toFixed(0)} ms`, left, height - 3);
}
