// Where the time of a lane's rounds went, on canvas: one row for each that was at work, on one time axis.

import { firstShown, prepared } from "./rounds.js";

const NUM_SHOWN = 14;
/** Rounds before and after those shown whose drafts may be on their way at the same time. */
const NUM_BESIDE = 40;
const NUM_WIRES = 3;
const LEFT = 92;
const ROWS = [
  ["target", "target"],
  ["draft", "draft model"],
  ["wire", "wire, queue"],
  ["wait", "waiting"],
];
/** How much later than its forward began a draft may seem to have arrived, in milliseconds: clocks are read one after the other. */
const SLACK_MS = 2;

/**
 * @typedef {object} Span - Of one row of the chart, in milliseconds from the first round's start.
 * @property {string} row
 * @property {number} round - Index of the round that it belongs to.
 * @property {number} from
 * @property {number} to
 */

/**
 * @param {import("./lane.js").Round[]} rounds
 * @returns {boolean} Whether they have times of their own drafts; those of old servers and recordings have none.
 */
export function hasDraftTimes(rounds) {
  return rounds.some((round) => round.times.draft_latency_ms > 0 || round.times.draft_forward_ms > 0);
}

/**
 * Says where the time of rounds went. A draft counts for the round that used it: its way began with a commit, perhaps
 * several rounds before. The times of the draft model's forwards are not reported: they are taken to have ended as late
 * as they can, half of a usual way before their drafts arrived, one at a time.
 * @param {import("./lane.js").Round[]} rounds
 * @param {{draft_latency_ms: number, draft_forward_ms: number} | null} medians - Stand in where rounds have no times of drafts.
 * @returns {{starts: number[], spans: Span[]}} When each round begins, and the end of the last; and the spans.
 */
export function timeline(rounds, medians = null) {
  const starts = [0];
  for (const round of rounds) starts.push(starts[starts.length - 1] + (round.times.round_ms ?? 0));
  const isMeasured = hasDraftTimes(rounds);
  const drafts = rounds.map((round) => {
    const { draft_latency_ms: latency = 0, draft_forward_ms: forward = 0 } = isMeasured ? round.times : ((round.numDrafted && medians) || {});
    return { latency, forward };
  });
  const way = middle(drafts.filter(({ latency }) => latency).map(({ latency, forward }) => Math.max(0, latency - forward) / 2));
  const spans = /** @type {Span[]} */ ([]);
  let draftsFrom = Infinity;
  for (let round = rounds.length - 1; round >= 0; round--) {
    const { times } = rounds[round];
    const { latency, forward } = drafts[round];
    const begins = starts[round] + (times.wait_ms ?? 0);
    const sent = isMeasured ? commitOf(starts, round, begins, latency) : starts[round];
    const arrived = latency ? sent + latency : begins;
    spans.push({ row: "wait", round, from: starts[round], to: begins });
    spans.push({ row: "target", round, from: begins, to: begins + (times.forward_ms ?? 0) });
    if (latency) spans.push({ row: "wire", round, from: sent, to: arrived });
    if (forward) {
      const to = Math.min(arrived - way, draftsFrom);
      spans.push({ row: "draft", round, from: to - forward, to });
      draftsFrom = to - forward;
    }
  }
  return { starts, spans: spans.reverse().filter((span) => span.to > span.from) };
}

/**
 * @param {number[]} values
 * @returns {number} The one in the middle, or 0 without values.
 */
function middle(values) {
  return values.sort((left, right) => left - right)[Math.floor(values.length / 2)] ?? 0;
}

/**
 * Finds the commit that a draft has answered: the latest from which it can have arrived before its round's forward.
 * @param {number[]} starts
 * @param {number} round
 * @param {number} begins - When the forward begins.
 * @param {number} latency
 * @returns {number} When it was sent.
 */
function commitOf(starts, round, begins, latency) {
  for (let commit = round; commit > 0; commit--) if (starts[commit] + latency <= begins + SLACK_MS) return starts[commit];
  return begins - latency;
}

/**
 * Gives spans that overlap different lines.
 * @param {Span[]} spans - In the order of their beginnings or nearly so.
 * @param {number} numLines
 * @returns {number[]} The line of each.
 */
export function linesOf(spans, numLines) {
  const ends = Array(numLines).fill(-Infinity);
  return spans.map((span) => {
    const free = ends.findIndex((end) => end <= span.from);
    const line = free < 0 ? ends.indexOf(Math.min(...ends)) : free;
    ends[line] = span.to;
    return line;
  });
}

/**
 * Sums the times of a lane up in words.
 * @param {import("./lane.js").Lane} lane
 * @returns {string}
 */
export function timesInWords(lane) {
  const { rounds } = lane;
  const sum = (/** @type {string} */ name) => rounds.reduce((total, round) => total + (round.times[name] ?? 0), 0);
  if (!rounds.length) return "Where the time goes: drafts are made while the model computes.";
  const words = [`Medians: forward ${lane.median("forward_ms").toFixed(1)} ms`];
  const isMeasured = hasDraftTimes(rounds);
  const drafts = isMeasured
    ? { draft_latency_ms: lane.median("draft_latency_ms", true), draft_forward_ms: lane.median("draft_forward_ms", true) }
    : lane.draftTimes;
  if (drafts) {
    words.push(`draft model ${drafts.draft_forward_ms.toFixed(1)} ms a round`);
    if (drafts.draft_latency_ms) words.push(`from commit to draft ${drafts.draft_latency_ms.toFixed(1)} ms`);
  }
  const waited = (100 * sum("wait_ms")) / Math.max(1e-9, sum("round_ms"));
  const missing = !isMeasured && rounds.some((round) => round.numDrafted);
  return (
    `${words.join(", ")}. The model waited ${waited < 0.05 ? "0" : waited.toFixed(1)} % of its time.` +
    (missing ? ` ${NO_TIMES}${drafts ? " They are drawn from the medians of the run." : ""}` : "")
  );
}

export const NO_TIMES = "This race has no times of drafts for each round.";

/**
 * Draws where the time of some rounds went: one row each for the forward, the draft model, the wire with the queue, and waiting.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./lane.js").Lane} lane
 * @param {number} selected - A round that is among those shown.
 */
export function drawTimes(canvas, lane, selected) {
  const { context, width, height, colour } = prepared(canvas);
  const bottom = height - 20;
  const rowHeight = bottom / ROWS.length;
  const firstOfAll = firstShown(lane.rounds.length, NUM_SHOWN, selected);
  // Not all rounds: there may be thousands, and this is drawn in each frame.
  const skipped = Math.max(0, firstOfAll - NUM_BESIDE);
  const rounds = lane.rounds.slice(skipped, firstOfAll + NUM_SHOWN + NUM_BESIDE);
  const first = firstOfAll - skipped;
  const last = Math.min(rounds.length, first + NUM_SHOWN);
  const chosen = selected - skipped;
  const { starts, spans } = timeline(rounds, lane.draftTimes);
  const [begin, end] = [starts[first], Math.max(starts[last], starts[first] + 1)];
  const scale = (width - LEFT) / (end - begin);
  const place = (/** @type {number} */ ms) => LEFT + Math.max(0, Math.min(end, ms) - begin) * scale;
  if (last > first) {
    context.fillStyle = colour("wash");
    context.fillRect(place(starts[chosen]), 0, place(starts[chosen + 1]) - place(starts[chosen]), bottom);
  }
  ROWS.forEach(([row, label], index) => {
    const top = index * rowHeight;
    context.fillStyle = colour("muted");
    context.fillText(label, 0, top + rowHeight / 2 + 4);
    context.fillStyle = colour("line");
    context.fillRect(LEFT, top + rowHeight - 1, width - LEFT, 1);
    const own = spans.filter((span) => span.row === row && span.to > begin && span.from < end);
    const numLines = row === "wire" ? NUM_WIRES : 1;
    const lines = linesOf(own, numLines);
    const lineHeight = (rowHeight - 10) / numLines;
    context.fillStyle = colour(row);
    own.forEach((span, number) => {
      context.globalAlpha = span.round === chosen ? 1 : 0.62;
      const x = place(span.from);
      context.fillRect(x, top + 5 + lines[number] * lineHeight, Math.max(1, place(span.to) - x - 1), lineHeight - (numLines > 1 ? 2 : 0));
    });
    context.globalAlpha = 1;
  });
  context.fillStyle = colour("line");
  for (let round = first; round < last; round++) context.fillRect(place(starts[round]), 0, 1, bottom);
  context.fillStyle = colour("muted");
  context.fillText(`${last - first} rounds, ${(starts[last] - begin).toFixed(0)} ms`, LEFT, height - 3);
}
