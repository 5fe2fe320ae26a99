// A chart of tokens per second over time, one line for each lane, as SVG; and the same as a table.

import { element } from "./tree.js";

const NUM_STEPS = 96;
const NUM_ROWS = 10;
const [TOP, BOTTOM, LEFT, RIGHT] = [12, 24, 38, 12];

/**
 * Counts tokens in a moving window.
 * @param {[number, number][]} arrivals - Times in milliseconds, and how many tokens had come by then.
 * @param {number} untilMs
 * @param {number} windowMs
 * @param {number} numSteps
 * @returns {[number, number][]} Times from 0 to the end, and the tokens per second of the window before each.
 */
export function speedsOf(arrivals, untilMs, windowMs, numSteps) {
  const speeds = /** @type {[number, number][]} */ ([]);
  let [behind, ahead] = [0, 0];
  const numAt = (/** @type {number} */ index) => (index ? arrivals[index - 1][1] : 0);
  for (let step = 0; step <= numSteps; step++) {
    const now = (untilMs * step) / numSteps;
    while (ahead < arrivals.length && arrivals[ahead][0] <= now) ahead++;
    while (behind < arrivals.length && arrivals[behind][0] <= now - windowMs) behind++;
    // At the beginning the window is as long as the time that has passed.
    const passed = Math.min(windowMs, now);
    speeds.push([now, passed > 0 ? (1000 * (numAt(ahead) - numAt(behind))) / passed : 0]);
  }
  return speeds;
}

/**
 * @param {number} durationMs
 * @returns {number} The length of the window for a race so long, in milliseconds.
 */
export function windowOf(durationMs) {
  return Math.max(200, Math.min(1000, durationMs / 8));
}

/**
 * @param {number} most
 * @returns {number} A step of the axis, such that at most five lines fit.
 */
function stepOf(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, most)));
  return [0.2, 0.5, 1, 2].map((each) => each * power).find((each) => most / each <= 5) ?? 5 * power;
}

/**
 * @param {import("./lane.js").Lane} lane
 * @returns {string}
 */
function speedInWords(lane) {
  return `${lane.method}: ${lane.tokens.length} tokens in ${(lane.elapsedMs / 1000).toFixed(2)} s, ${lane.tokensPerSecond.toFixed(0)} a second on the whole`;
}

/**
 * Draws the lines.
 * @param {SVGSVGElement} svg
 * @param {import("./lane.js").Lane[]} lanes
 */
export function drawSpeeds(svg, lanes) {
  const { clientWidth: width, clientHeight: height } = svg;
  const duration = Math.max(1, ...lanes.map((lane) => lane.elapsedMs));
  const windowMs = windowOf(duration);
  const lines = lanes.map((lane) => speedsOf(lane.arrivals, lane.elapsedMs, windowMs, NUM_STEPS));
  // The first moments, with a window of almost no time, would flatten all else.
  const most = Math.max(1, ...lines.flatMap((line) => line.filter(([at]) => at >= windowMs / 2).map(([, speed]) => speed)));
  const x = (/** @type {number} */ ms) => LEFT + ((width - LEFT - RIGHT) * ms) / duration;
  const y = (/** @type {number} */ speed) => height - BOTTOM - ((height - TOP - BOTTOM) * Math.min(speed, most)) / most;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element("title", {}, svg).textContent = "Tokens per second over time";
  element("desc", {}, svg).textContent = `${lanes.map(speedInWords).join(". ")}.`;
  for (let speed = 0; speed <= most; speed += stepOf(most)) {
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(speed), y2: y(speed) }, svg);
    element("text", { x: LEFT - 8, y: y(speed) + 4, "text-anchor": "end" }, svg).textContent = String(speed);
  }
  const seconds = stepOf(duration / 1000);
  for (let at = 0; at <= duration / 1000 - seconds / 3; at += seconds) {
    element("text", { x: x(at * 1000), y: height - 6 }, svg).textContent = `${Number(at.toFixed(2))} s`;
  }
  lines.forEach((line, side) => {
    const points = line.map(([at, speed]) => `${x(at).toFixed(1)} ${y(speed).toFixed(1)}`);
    element("path", { class: `speed-line side-${side}`, d: `M${points.join("L")}` }, svg);
    if (lanes[side].finishReason) element("circle", { class: `side-${side}`, cx: x(line[NUM_STEPS][0]), cy: y(line[NUM_STEPS][1]), r: 3.5 }, svg);
  });
}

/**
 * Fills a table with the speeds of the chart, at fewer times.
 * @param {HTMLTableElement} table
 * @param {import("./lane.js").Lane[]} lanes
 */
export function tabulateSpeeds(table, lanes) {
  const duration = Math.max(1, ...lanes.map((lane) => lane.elapsedMs));
  const lines = lanes.map((lane) => speedsOf(lane.arrivals, duration, windowOf(duration), NUM_ROWS));
  table.replaceChildren();
  const add = (/** @type {string} */ kind, /** @type {string[]} */ words) => {
    const row = table.insertRow();
    for (const word of words) row.append(Object.assign(document.createElement(kind), { textContent: word }));
  };
  add("th", ["Second", ...lanes.map((lane) => lane.method)]);
  for (let step = 1; step <= NUM_ROWS; step++) {
    // A lane that is over has no speed any more.
    const speeds = lines.map((line, side) => (line[step - 1][0] < lanes[side].elapsedMs ? line[step][1].toFixed(0) : "–"));
    add("td", [(lines[0][step][0] / 1000).toFixed(2), ...speeds]);
  }
}
