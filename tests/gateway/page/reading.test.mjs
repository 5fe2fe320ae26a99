// Pure parts of the page, as node runs them: `node --test`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const from = (name) => import(new URL(`../../../services/outrider/gateway/page/static/${name}.js`, import.meta.url));
const { EventParser, chunkOf, requestOf } = await from("api");
const { TextCutter, visible } = await from("cutting");
const { Comparison, Lane, verdict } = await from("lane");
const { parse, Player } = await from("recording");
const { firstShown, spansOf } = await from("rounds");
const { layOut } = await from("tree");
const { curl, python } = await from("snippets");

const RACE = readFileSync(new URL("race.json", import.meta.url), "utf8");
const filled = (side) => {
  const { method, events } = JSON.parse(RACE).lanes[side];
  const lane = new Lane(method);
  for (const [atMs, event] of events) lane.take(event, atMs);
  return lane;
};
const joined = (pieces) => pieces.map((piece) => piece.text).join("");

test("events are the same wherever the stream is cut", () => {
  const stream = ': ping\n\ndata: {"a": 1}\n\ndata: x\r\ndata:y\r\n\r\nevent: other\rdata: z\r\r\n';
  for (let at = 0; at <= stream.length; at++) {
    const parser = new EventParser();
    assert.deepEqual([...parser.push(stream.slice(0, at)), ...parser.push(stream.slice(at))], ['{"a": 1}', "x\ny", "z"], `cut at ${at}`);
  }
});

test("ends count characters, not UTF-16 units", () => {
  const pieces = new TextCutter().push("a😀b𝒳", [2, 2, 4]);
  assert.deepEqual(pieces, [{ token: 0, text: "a😀" }, { token: 2, text: "b𝒳" }]);
});

test("text that was held back comes to its token later, and what no token ends, to the last", () => {
  const cutter = new TextCutter();
  const pieces = [...cutter.push("ab", [4, 6]), ...cutter.push("cd", [8]), ...cutter.push("efgh!", [])];
  assert.deepEqual(pieces.map((piece) => [piece.token, piece.text]), [[0, "ab"], [0, "cd"], [1, "ef"], [2, "gh!"]]);
});

test("a text is whole without ends", () => {
  const cutter = new TextCutter();
  assert.equal(joined([...cutter.push("one", [], 2), ...cutter.push(" two", [], 0), ...cutter.push(" 3", [], 1)]), "one two 3");
});

test("a recorded lane has the API's text, token by token", () => {
  for (const side of [0, 1]) {
    const lane = filled(side);
    const text = JSON.parse(RACE).lanes[side].events.map(([, event]) => event.choices[0]?.text ?? "").join("");
    assert.equal(lane.text, text);
    assert.equal(lane.tokens.map((token) => token.text).join(""), text);
    for (const round of lane.rounds) assert.equal(round.numTokens, round.numAccepted + 1);
  }
});

test("every kept path of a recorded tree is the tokens of its round", () => {
  const lane = filled(1);
  let numKept = 0;
  for (const round of lane.rounds) {
    const tokens = lane.tokens.slice(round.firstToken, round.firstToken + round.numTokens);
    const boxes = layOut(round.tree, tokens.map((token) => token.id), round.numAccepted, { root: "", own: tokens.at(-1).text });
    const kept = boxes.filter((box) => box.fate === "kept");
    assert.equal(kept.length, round.numAccepted);
    assert.ok(kept.every((box) => box.row === 0));
    assert.equal(boxes.length, round.tree.parents.length + 2);
    assert.equal(new Set(boxes.map((box) => `${box.depth} ${box.row}`)).size, boxes.length, "two boxes at one place");
    numKept += kept.length;
  }
  assert.ok(numKept > 20);
});

test("two lanes are compared to the first difference", () => {
  const [left, right] = [filled(0), filled(1)];
  assert.deepEqual(new Comparison().update(left, right), { numSame: 64, numCompared: 64, differsAt: null });
  const how = { isAtOnce: true, isStopped: false, dtype: "bfloat16" };
  left.elapsedMs = 2700;
  right.elapsedMs = 1000;
  assert.equal(verdict(left, right, how).headline, "The same text, 2.7 times as fast.");
  assert.equal(verdict(right, left, how).headline, "The same text, 2.7 times as slow.");
  assert.equal(verdict(left, right, { ...how, isStopped: true }).headline, "The same text so far: 64 tokens.");
  right.tokens[11].id += 1;
  const { headline, detail } = verdict(left, right, how);
  assert.equal(headline, "The texts part at token 12.");
  assert.match(detail, /bfloat16/);
});

test("a recording plays at its own pace", () => {
  const player = new Player(parse(RACE));
  const got = [0, 0];
  let numSteps = 0;
  while (!player.isOver) {
    player.advance(10, (side, _event, atMs) => {
      got[side]++;
      assert.ok(player.recording.lanes[side].startMs + atMs <= player.nowMs);
    });
    assert.ok(++numSteps < 10_000);
  }
  assert.deepEqual(got, player.recording.lanes.map((lane) => lane.events.length));
});

test("a file that is no recording is refused in words", () => {
  assert.throws(() => parse("{"), /not JSON/);
  assert.throws(() => parse("{}"), /not a recording/);
  assert.throws(() => parse(RACE.replace('"version":1', '"version":2')), /version 2/);
});

test("the wire is what a draft takes beyond its forwards, half of it each way", () => {
  const spans = spansOf({ wait_ms: 1, forward_ms: 20, draft_latency_ms: 10, draft_forward_ms: 6 }, 100);
  assert.deepEqual(spans.map(({ row, from, to }) => [row, from, to]), [["wait", 100, 101], ["target", 101, 121], ["wire", 100, 102], ["draft", 102, 108], ["wire", 108, 110]]);
});

test("the selected round is always among those shown", () => {
  for (let selected = 0; selected < 50; selected++) {
    const first = firstShown(50, 14, selected);
    assert.ok(first >= 0 && first <= selected && selected < first + 14 && first + 14 <= 50);
  }
});

test("chats are read like completions", () => {
  const chunk = chunkOf({ choices: [{ delta: { content: "hi" }, logprobs: { content: [{ logprob: -1, top_logprobs: [{ token: "hi", logprob: -1 }] }] } }] });
  assert.equal(chunk.text, "hi");
  assert.deepEqual(chunk.logprobs, [{ logprob: -1, top: [["hi", -1]] }]);
});

test("code has exactly the request, whatever the prompt has in it", () => {
  const settings = { prompt: "it's\n\"x\"", isChat: true, temperature: 0, seed: 1, maxTokens: 5, model: "m" };
  const request = requestOf(settings, "auto", []);
  const body = /-d '([^]*)'$/.exec(curl(request, "http://h"))[1].replaceAll("'\\''", "'");
  assert.deepEqual(JSON.parse(body), request.body);
  assert.match(python(request, "http://h"), /extra_body=\{"speculation": \{"method": "auto"\}\}/);
  assert.equal(visible("a b\n"), "a·b↵");
});
