// The draft tree of a round: where its boxes stand, and how it is drawn.

import { shortened, visible } from "./cutting.js";
import { familyOf, meaningOf } from "./sources.js";

/**
 * @typedef {object} Box
 * @property {string} text
 * @property {string} family
 * @property {"kept" | "refused" | "own" | "root"} fate
 * @property {number} probability - Given the box before it.
 * @property {number} path - Of the whole path to it.
 * @property {string} title
 * @property {number} parent - Index of the box before it; -1 for the root.
 * @property {number} depth
 * @property {number} row
 */

/**
 * Lays a round's tree out: the kept path is the first row, what was refused hangs below where it left the path.
 * @param {any} tree - Of the API; null for a round without drafts.
 * @param {number[]} tokenIds - Of the round.
 * @param {number} numAccepted - How many of them were drafted.
 * @param {{root: string, own: string}} texts - What stands before the round, and the token that the target drew itself.
 * @returns {Box[]} The root first, parents before children, the target's own token last, if there is one.
 */
export function layOut(tree, tokenIds, numAccepted, texts) {
  const nodes = tree ?? { parents: [], token_ids: [], texts: [], probabilities: [], sources: [] };
  const children = new Map();
  nodes.parents.forEach((/** @type {number} */ parent, /** @type {number} */ node) => {
    children.set(parent, [...(children.get(parent) ?? []), node]);
  });
  const kept = keptPath(nodes, children, tokenIds.slice(0, numAccepted));
  const isKept = new Set(kept);
  /** @type {Box[]} */
  const boxes = [
    { text: texts.root, family: "target", fate: "root", probability: 1, path: 1, title: "the text before this round", parent: -1, depth: 0, row: 0 },
  ];
  const boxOf = new Map([[-1, 0]]);
  let numRows = 0;
  const tip = kept.at(-1) ?? -1;
  const hasOwn = tokenIds.length > kept.length;
  /** @param {number} node @param {number} depth */
  const place = (node, depth) => {
    const before = boxes[/** @type {number} */ (boxOf.get(node))];
    const next = [...(children.get(node) ?? [])].sort(
      (left, right) => Number(isKept.has(right)) - Number(isKept.has(left)) || nodes.probabilities[right] - nodes.probabilities[left],
    );
    // The target's own token goes on in the row of the kept path: guesses next to it begin a row below.
    let isFirst = !(node === tip && hasOwn);
    for (const child of next) {
      const row = isFirst ? before.row : ++numRows;
      isFirst = false;
      const probability = nodes.probabilities[child] ?? 0;
      const fate = isKept.has(child) ? "kept" : "refused";
      boxOf.set(child, boxes.length);
      boxes.push({
        text: nodes.texts[child] ?? "",
        family: familyOf(nodes.sources[child]),
        fate,
        probability,
        path: before.path * probability,
        title: `${fate}: ${meaningOf(nodes.sources[child])} gave it ${percent(probability)}`,
        parent: /** @type {number} */ (boxOf.get(node)),
        depth: depth + 1,
        row,
      });
      place(child, depth + 1);
    }
  };
  place(-1, 0);
  if (hasOwn) {
    const before = /** @type {number} */ (boxOf.get(tip));
    boxes.push({
      text: texts.own,
      family: "target",
      fate: "own",
      probability: 1,
      path: boxes[before].path,
      title: "drawn by the model itself",
      parent: before,
      depth: boxes[before].depth + 1,
      row: boxes[before].row,
    });
  }
  return boxes;
}

/**
 * @param {any} nodes
 * @param {Map<number, number[]>} children
 * @param {number[]} tokenIds
 * @returns {number[]} Nodes that were kept, from the root.
 */
function keptPath(nodes, children, tokenIds) {
  const path = [];
  let node = -1;
  for (const tokenId of tokenIds) {
    const next = (children.get(node) ?? []).find((child) => nodes.token_ids[child] === tokenId);
    if (next === undefined) break;
    path.push(next);
    node = next;
  }
  return path;
}

/** @param {number} share @returns {string} */
export function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 30;
const ROW = 42;
const LETTER = 8.5;

/**
 * @param {string} name
 * @param {Record<string, string | number>} attributes
 * @param {SVGElement} [parent]
 * @returns {SVGElement}
 */
export function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  parent?.append(made);
  return made;
}

/**
 * Draws boxes into an SVG element.
 * @param {SVGSVGElement} svg
 * @param {Box[]} boxes
 */
export function draw(svg, boxes) {
  const labels = boxes.map((box) => (box.fate === "root" ? box.text : visible(shortened(box.text, 14)) || "∅"));
  const widths = /** @type {number[]} */ ([]);
  boxes.forEach((box, index) => {
    widths[box.depth] = Math.max(widths[box.depth] ?? 0, labels[index].length * LETTER + 20);
  });
  const starts = [2];
  for (let depth = 0; depth < widths.length; depth++) starts.push(starts[depth] + widths[depth] + 26);
  const numRows = Math.max(...boxes.map((box) => box.row)) + 1;
  const width = starts[widths.length] - 22;
  const height = numRows * ROW - (ROW - HEIGHT) + 6;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", String(width));
  svg.setAttribute("height", String(height));
  const edges = element("g", { class: "edges" }, svg);
  boxes.forEach((box, index) => {
    const [x, y] = [starts[box.depth], 3 + box.row * ROW];
    const boxWidth = labels[index].length * LETTER + 20;
    if (box.parent >= 0) {
      const before = boxes[box.parent];
      const [fromX, fromY] = [starts[before.depth] + labels[box.parent].length * LETTER + 20, 3 + before.row * ROW + HEIGHT / 2];
      const [toX, toY] = [x, y + HEIGHT / 2];
      const middle = toX - 13;
      element("path", { class: `edge ${box.fate}`, d: `M${fromX} ${fromY}H${middle - 6}Q${middle} ${fromY} ${middle} ${fromY === toY ? fromY : fromY + 6}V${fromY === toY ? toY : toY - 6}Q${middle} ${toY} ${fromY === toY ? middle : middle + 6} ${toY}H${toX}`, "stroke-width": 1 + 3 * box.probability, "stroke-opacity": 0.35 + 0.65 * box.path }, edges);
    }
    const group = element("g", { class: `box ${box.fate} from-${box.family}`, transform: `translate(${x} ${y})` }, svg);
    element("title", {}, group).textContent = box.title;
    element("rect", { class: "frame", width: boxWidth, height: HEIGHT, rx: 6 }, group);
    if (box.fate === "kept" || box.fate === "refused") {
      element("rect", { class: "probability", y: HEIGHT - 3, x: 4, width: Math.max(2, (boxWidth - 8) * box.probability), height: 2, rx: 1 }, group);
    }
    element("text", { x: 10, y: HEIGHT / 2 + 5 }, group).textContent = labels[index];
  });
}
