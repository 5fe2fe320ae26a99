// Pure parts of the page, as node runs them: `node --test`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const from = (name) => import(new URL(`../../../clients/outrider_gateway/page/static/${name}.js`, import.meta.url));
const { EventParser, chunkOf, requestOf } = await from("api");
const { TextCutter, visible } = await from("cutting");
const { Comparison, Lane, verdict } = await from("lane");
const { whyNoDrafts, wordsOf } = await from("load");
const { parse, Player } = await from("recording");
const { firstShown, runsOf } = await from("rounds");
const { speedsOf } = await from("speed");
const { NO_TIMES, linesOf, timeline, timesInWords } = await from("times");
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

const roundOf = (times, numDrafted = 1) => ({ method: "pearl", numDrafted, times: { round_ms: 20, forward_ms: 18, wait_ms: 0, ...times } });
const rowsOf = (spans, row) => spans.filter((span) => span.row === row).map(({ round, from, to }) => [round, from, to]);

test("a draft that is waited for lies between its commit and the forward, half of the way on each side", () => {
  const { spans } = timeline([roundOf({}), roundOf({ round_ms: 31, wait_ms: 10, draft_latency_ms: 10, draft_forward_ms: 6 })]);
  assert.deepEqual(rowsOf(spans, "wait"), [[1, 20, 30]]);
  assert.deepEqual(rowsOf(spans, "target"), [[0, 0, 18], [1, 30, 48]]);
  assert.deepEqual(rowsOf(spans, "wire"), [[1, 20, 30]]);
  assert.deepEqual(rowsOf(spans, "draft"), [[1, 22, 28]]);
});

test("over a long wire a draft's way begins with a commit of rounds ago, while forwards go on without a gap", () => {
  const rounds = Array.from({ length: 6 }, (_, index) => roundOf(index < 3 ? {} : { draft_latency_ms: 39, draft_forward_ms: 15 }));
  const { spans } = timeline(rounds);
  assert.deepEqual(rowsOf(spans, "wire"), [[3, 20, 59], [4, 40, 79], [5, 60, 99]]);
  assert.deepEqual(rowsOf(spans, "wait"), []);
  assert.deepEqual(rowsOf(spans, "draft").map(([, from, to]) => to - from), [15, 15, 15]);
  assert.deepEqual(linesOf(spans.filter((span) => span.row === "wire"), 3), [0, 1, 0]);
});

test("rounds of an old recording have drafts by the medians of the run, and it says so", () => {
  const lane = filled(1);
  lane.summary = { times_p50: { draft_latency_ms: 10, draft_forward_ms: 6 } };
  const { spans, starts } = timeline(lane.rounds, lane.draftTimes);
  const drafting = lane.rounds.flatMap((round, index) => (round.numDrafted ? [index] : []));
  assert.deepEqual(rowsOf(spans, "wire"), drafting.map((index) => [index, starts[index], starts[index] + 10]));
  assert.ok(timesInWords(lane).includes(`${NO_TIMES} They are drawn from the medians`));
  for (const round of lane.rounds) round.times = { ...round.times, draft_latency_ms: 4, draft_forward_ms: 2 };
  assert.match(timesInWords(lane), /from commit to draft 4.0 ms. The model waited 0 % of its time.$/);
});

test("speeds are counted in a window, and are the lane's own on the whole", () => {
  const arrivals = Array.from({ length: 20 }, (_, index) => [(index + 1) * 100, (index + 1) * 5]);
  assert.deepEqual(speedsOf(arrivals, 2000, 500, 4), [[0, 0], [500, 50], [1000, 50], [1500, 50], [2000, 50]]);
  const burst = [[1000, 30], [2000, 31]];
  assert.deepEqual(speedsOf(burst, 2000, 500, 4).map(([, speed]) => speed), [0, 0, 60, 0, 2]);
});

test("rounds of one method are one run", () => {
  const rounds = ["off", "off", "pearl", "off"].map((method) => ({ method }));
  assert.deepEqual(runsOf(rounds), [{ method: "off", from: 0, to: 2 }, { method: "pearl", from: 2, to: 3 }, { method: "off", from: 3, to: 4 }]);
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
  const settings = { prompt: "it's\n\"x\"", isChat: true, turns: [], isJson: false, temperature: 0, seed: 1, maxTokens: 5, model: "m" };
  const request = requestOf(settings, "auto", []);
  const body = /-d '([^]*)'$/.exec(curl(request, "http://h"))[1].replaceAll("'\\''", "'");
  assert.deepEqual(JSON.parse(body), request.body);
  assert.match(python(request, "http://h"), /extra_body=\{"speculation": \{"method": "auto"\}\}/);
  assert.equal(visible("a b\n"), "a·b↵");
});

test("a draft model that is away has its reason wherever it is spoken of", () => {
  const away = { connected: false, last_error: "its tokenizer is another one" };
  const state = (load) => [whyNoDrafts(load), new Map(wordsOf(load)).get("Draft model")];
  assert.deepEqual(state({ speculators: [away] }), ["its tokenizer is another one", "away: its tokenizer is another one"]);
  assert.deepEqual(state({ speculators: [away, { connected: true, last_error: "" }] })[0], "");
  assert.deepEqual(state({ speculators: [{ connected: false, last_error: "" }] }), ["", "not used yet"]);
  assert.deepEqual(state({}), ["", "none"]);
});
