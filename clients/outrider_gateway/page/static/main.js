// Puts the page together: the form, the race, its figures, recordings.

import { ApiError, generate, requestOf } from "./api.js";
import { shortened, visible } from "./cutting.js";
import { TEXTS, TURNS } from "./examples.js";
import { act, state as labState } from "./lab.js";
import { Comparison, Lane, verdict } from "./lane.js";
import { watch, whyNoDrafts, wordsOf } from "./load.js";
import { colourOfMethod, learnMethods, meaningOfMethod, methodNames } from "./methods.js";
import { parse, Player, recordingOf } from "./recording.js";
import { drawBars } from "./rounds.js";
import { curl, python } from "./snippets.js";
import { FAMILIES } from "./sources.js";
import { drawSpeeds, tabulateSpeeds } from "./speed.js";
import { TextView } from "./text.js";
import { drawTimes, timesInWords } from "./times.js";
import { draw, layOut, percent } from "./tree.js";

/** @param {string} id @returns {any} */
const at = (id) => document.getElementById(id);

const SIDES = [0, 1];
const page = {
  lanes: [new Lane("off"), new Lane("auto")],
  recording: /** @type {import("./recording.js").Recording | null} */ (null),
  comparison: new Comparison(),
  player: /** @type {Player | null} */ (null),
  abort: /** @type {AbortController | null} */ (null),
  watching: /** @type {AbortController | null} */ (null),
  model: { id: "", dtype: "" },
  turns: /** @type {{role: string, content: string}[]} */ ([]),
  lab: /** @type {any} */ (null),
  whyNoDrafts: "",
  shown: 1,
  round: 0,
  follows: true,
  isDirty: true,
  bars: { first: 0, width: 8 },
};
const views = SIDES.map((side) => new TextView(at(`text-${side}`), at("card"), (round) => {
  at("form").ownerDocument.querySelector(`[name=lane][value="${side}"]`).checked = true;
  page.shown = side;
  chooseRound(round);
}));

/** Asks for one drawing in the next frame, however much arrives until then. */
function touch() {
  if (page.isDirty) return;
  page.isDirty = true;
  requestAnimationFrame(() => {
    page.isDirty = false;
    render();
  });
}

/** @returns {import("./api.js").Settings} */
function settings() {
  return {
    prompt: at("prompt").value,
    isChat: at("chat").checked,
    turns: at("chat").checked ? page.turns : [],
    isJson: at("chat").checked && at("json").checked,
    temperature: at("temperature").valueAsNumber,
    seed: at("seed").valueAsNumber,
    maxTokens: at("tokens").valueAsNumber,
    model: page.model.id,
  };
}

/** @returns {import("./examples.js").Example[]} */
const examples = () => (at("chat").checked ? TURNS : TEXTS);

/** @param {number} index */
function chooseExample(index) {
  const { prompt, isJson } = examples()[index];
  at("prompt").value = prompt;
  at("json").checked = Boolean(isJson);
}

/** Offers what fits to a chat, or to a text. What the user has typed stays. */
function showKind() {
  const isChat = at("chat").checked;
  const isUntouched = [...TURNS, ...TEXTS].some(({ prompt }) => prompt === at("prompt").value) || !at("prompt").value;
  at("prompt-label").textContent = isChat ? "Your turn" : "Prompt";
  at("json-label").hidden = !isChat;
  at("example").replaceChildren(...examples().map(({ name }) => new Option(name)));
  if (isUntouched && !page.turns.length) chooseExample(0);
  renderTurns();
}

function renderTurns() {
  const isChat = at("chat").checked;
  at("turns").hidden = at("fresh").hidden = !isChat || !page.turns.length;
  at("turns").replaceChildren(...page.turns.map(({ role, content }) => {
    const item = document.createElement("li");
    item.className = role;
    item.textContent = content;
    return item;
  }));
  at("turns").scrollTop = at("turns").scrollHeight;
}

/** Adds what was asked and answered to the conversation. Until then the same turn can be raced again. */
function goOn() {
  const { settings: asked } = /** @type {import("./recording.js").Recording} */ (page.recording);
  const answer = page.lanes[1].text;
  page.turns = [...(asked.turns ?? []), { role: "user", content: asked.prompt }, { role: "assistant", content: answer }];
  at("prompt").value = "";
  at("reply").hidden = true;
  renderTurns();
  renderCode();
  at("prompt").focus();
}

/** @param {string} words @param {string} [param] */
function complain(words, param = "") {
  at("problem").hidden = !words;
  at("problem").textContent = words;
  for (const [name, id] of [["prompt", "prompt"], ["temperature", "temperature"], ["seed", "seed"], ["max_tokens", "tokens"]]) {
    at(id).toggleAttribute("aria-invalid", name === param);
    if (name === param) at(id).focus();
  }
}

/** @param {import("./recording.js").Recording} recording - Empty, or to be played. */
function begin(recording) {
  page.recording = recording;
  page.lanes = recording.lanes.map((lane) => new Lane(lane.method));
  page.comparison = new Comparison();
  page.round = 0;
  page.follows = true;
  SIDES.forEach((side) => {
    views[side].begin(page.lanes[side]);
    at(`key-${side}`).textContent = page.lanes[side].method;
  });
  at("verdict").className = "verdict";
  at("reply").hidden = true;
  complain("");
}

/** @param {boolean} isStopped */
function end(isStopped) {
  const recording = /** @type {import("./recording.js").Recording} */ (page.recording);
  render();
  const [left, right] = page.lanes;
  showRichestTree();
  tabulateSpeeds(at("speed-table"), page.lanes);
  const said = verdict(left, right, { isAtOnce: recording.isAtOnce, isStopped, dtype: recording.model.dtype });
  at("verdict").className = `verdict ${said.kind}`;
  at("headline").textContent = said.headline;
  const missing = page.lanes.flatMap((lane) => lane.summary?.missing_peers ?? []);
  const detail = [said.detail, ...new Set(missing.map((words) => `In part ${words}.`))].join(" ");
  at("detail").textContent = detail;
  at("status").textContent = `${said.headline} ${detail}`;
  at("go").textContent = "Start";
  at("save").disabled = false;
  at("reply").hidden = isStopped || !recording.settings.isChat || !page.lanes[1].finishReason;
  document.body.dataset.state = "done";
}

/** Leaves the slider at the round with most guesses: the last one is often small. */
function showRichestTree() {
  if (!page.follows) return;
  const { rounds } = page.lanes[page.shown];
  page.round = rounds.reduce((best, round, index) => (round.numDrafted > rounds[best].numDrafted ? index : best), 0);
  page.follows = false;
  renderRounds();
}

async function race() {
  page.player = null;
  at("player").hidden = true;
  const asked = settings();
  const isAtOnce = !at("turns").checked;
  const lanes = SIDES.map((side) => ({ method: at(`method-${side}`).value, startMs: 0, events: /** @type {[number, object][]} */ ([]) }));
  begin(recordingOf({ model: page.model, settings: asked, isAtOnce, lanes }));
  const abort = (page.abort = new AbortController());
  at("go").textContent = "Stop";
  at("status").textContent = "The race has begun.";
  document.body.dataset.state = "running";
  const began = performance.now();
  const token = at("key").value;
  const run = async (/** @type {number} */ side) => {
    const start = performance.now();
    lanes[side].startMs = start - began;
    for await (const event of generate(requestOf(asked, lanes[side].method), { token, signal: abort.signal })) {
      const atMs = Math.round((performance.now() - start) * 100) / 100;
      lanes[side].events.push([atMs, event]);
      page.lanes[side].take(event, atMs);
      touch();
    }
  };
  try {
    if (isAtOnce) await Promise.all(SIDES.map(run));
    else for (const side of SIDES) await run(side);
  } catch (error) {
    const isStop = abort.signal.aborted;
    abort.abort();
    if (error instanceof ApiError) complain(error.message, error.param ?? "");
    else if (!isStop) throw error;
  } finally {
    const isStopped = abort.signal.aborted;
    page.abort = null;
    end(isStopped);
  }
}

/** @param {import("./recording.js").Recording} recording */
function replay(recording) {
  page.abort?.abort();
  const { settings: asked } = recording;
  at("chat").checked = asked.isChat;
  at("json").checked = Boolean(asked.isJson);
  page.turns = asked.turns ?? [];
  showKind();
  at("prompt").value = asked.prompt;
  at("temperature").value = asked.temperature;
  at("seed").value = asked.seed;
  at("tokens").value = asked.maxTokens;
  SIDES.forEach((side) => setMethods(side, [...new Set([...methodNames(), recording.lanes[side].method])], recording.lanes[side].method));
  begin(recording);
  document.body.dataset.state = "running";
  const player = (page.player = new Player(recording));
  at("player").hidden = false;
  at("pause").textContent = "Pause";
  let before = performance.now();
  const step = (/** @type {number} */ now) => {
    if (page.player !== player) return;
    if (at("pause").textContent === "Pause") {
      player.advance((now - before) * Number(at("pace").value), (side, event, atMs) => page.lanes[side].take(event, atMs));
      touch();
    }
    before = now;
    if (player.isOver) end(false);
    else requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

/** @param {File} file */
async function open(file) {
  try {
    replay(parse(await file.text()));
  } catch (error) {
    complain(/** @type {Error} */ (error).message);
  }
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(page.recording)], { type: "application/json" }));
  link.download = "outrider-race.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

function render() {
  const [left, right] = page.lanes;
  SIDES.forEach((side) => {
    const lane = page.lanes[side];
    views[side].update();
    at(`speed-${side}`).textContent = lane.tokensPerSecond.toFixed(0);
    at(`progress-${side}`).value = lane.finishReason ? 1 : lane.tokens.length / (page.recording?.settings.maxTokens || 1);
    const first = lane.firstMs === null ? "" : `, the first after ${lane.firstMs.toFixed(0)} ms`;
    at(`facts-${side}`).textContent = lane.tokens.length ? `${lane.tokens.length} tokens in ${(lane.elapsedMs / 1000).toFixed(2)} s${first}` : "no tokens yet";
  });
  if (document.body.dataset.state === "running") {
    const { numSame, numCompared, differsAt } = page.comparison.update(left, right);
    at("headline").textContent = differsAt === null ? `Identical so far: ${numSame} of ${numCompared} tokens` : `The texts part at token ${differsAt + 1}.`;
    at("detail").textContent = page.recording?.isAtOnce ? "Both run at once and share the server." : "One after the other: each has the server alone.";
  }
  const { differsAt } = page.comparison.update(left, right);
  if (differsAt !== null) views.forEach((view) => view.markDifference(differsAt));
  renderLegend();
  drawSpeeds(at("speeds"), page.lanes);
  renderRounds();
}

function renderLegend() {
  const legend = at("legend");
  if (!legend.children.length) {
    for (const family of FAMILIES) {
      const item = document.createElement("li");
      const name = document.createElement("span");
      name.className = `token from-${family.id}`;
      name.textContent = family.label;
      const count = document.createElement("span");
      count.className = "count";
      item.title = family.meaning;
      item.append(name, count);
      legend.append(item);
    }
  }
  FAMILIES.forEach((family, index) => {
    const counts = page.lanes.map((lane) => lane.counts.get(family.id) ?? 0);
    legend.children[index].lastChild.textContent = `${counts[0]} | ${counts[1]}`;
    legend.children[index].hidden = index > 2 && !counts[0] && !counts[1];
  });
}

/** @param {HTMLElement} list @param {[string, string][]} entries */
function describe(list, entries) {
  if (list.children.length !== entries.length) {
    list.replaceChildren(...entries.map(() => {
      const entry = document.createElement("div");
      entry.append(document.createElement("dt"), document.createElement("dd"));
      return entry;
    }));
  }
  entries.forEach(([name, value], index) => {
    const [term, words] = list.children[index].children;
    term.textContent = name;
    words.textContent = value;
  });
}

function renderRounds() {
  const lane = page.lanes[page.shown];
  const last = Math.max(0, lane.rounds.length - 1);
  if (page.follows) page.round = last;
  page.round = Math.min(page.round, last);
  const totals = lane.totals;
  describe(at("numbers"), [
    ["Tokens per forward", totals.perForward ? totals.perForward.toFixed(2) : "–"],
    ["Guesses kept", totals.kept === null ? "–" : percent(totals.kept)],
    ["Rounds", String(lane.rounds.length)],
    [lane.method === "auto" ? "Chosen by auto" : "Method", lane.choices.slice(0, 3).map(([method, count]) => `${method} ×${count}`).join(", ") || "–"],
  ]);
  page.bars = drawBars(at("bars"), lane, page.round);
  drawTimes(at("times"), lane, page.round);
  renderChoices(lane);
  at("times-words").textContent = timesInWords(lane);
  at("times").setAttribute("aria-label", `Time of forward, draft model, wire and waiting. ${at("times-words").textContent}`);
  const slider = at("round");
  slider.max = String(last);
  slider.value = String(page.round);
  renderTree(lane);
}

/** @param {Lane} lane */
function renderChoices(lane) {
  const { choices } = lane;
  const list = at("choices");
  if (list.children.length !== choices.length) {
    list.replaceChildren(...choices.map(() => {
      const item = document.createElement("li");
      item.append(document.createElement("i"), document.createElement("span"));
      return item;
    }));
  }
  choices.forEach(([method, count], index) => {
    const item = list.children[index];
    item.title = meaningOfMethod(method);
    item.firstChild.style.background = `var(--${colourOfMethod(method)})`;
    item.lastChild.textContent = `${method} ×${count}`;
  });
}

/** @param {MouseEvent} event @returns {number} Index of the round under the pointer. */
function roundAt(event) {
  return page.bars.first + Math.floor(event.offsetX / page.bars.width);
}

/** @param {MouseEvent} event */
function tellRound(event) {
  const index = roundAt(event);
  const round = page.lanes[page.shown].rounds[index];
  at("bars").title = round
    ? `Round ${index + 1}: ${round.method}, ${meaningOfMethod(round.method)}. ${round.numAccepted} of ${round.numDrafted} guesses kept.`
    : "";
}

/** @param {Lane} lane */
function renderTree(lane) {
  const round = lane.rounds[page.round];
  const tokens = round ? lane.tokens.slice(round.firstToken, round.firstToken + round.numTokens) : [];
  const before = lane.tokens.slice(0, round?.firstToken ?? 0).slice(-6).map((token) => token.text).join("") || "prompt";
  const own = tokens.at(-1)?.text ?? "";
  const boxes = layOut(round?.tree ?? null, tokens.map((token) => token.id), round?.numAccepted ?? 0, { root: `…${visible(Array.from(before).slice(-10).join(""))}`, own });
  draw(at("tree"), boxes);
  const words = round
    ? `Round ${page.round + 1} of ${lane.rounds.length} (${round.method}): ${round.numAccepted} of ${round.numDrafted} guesses kept`
    : "No round yet";
  at("round-words").textContent = words;
  at("tree").setAttribute("aria-label", round ? `${words}. Text: ${shortened(tokens.map((token) => token.text).join(""), 80)}` : words);
}

/** @param {number} round */
function chooseRound(round) {
  page.follows = false;
  page.round = Math.max(0, round);
  touch();
}

/** @param {number} side @param {string[]} methods @param {string} chosen */
function setMethods(side, methods, chosen) {
  at(`method-${side}`).replaceChildren(...methods.map((method) => new Option(method, method, false, method === chosen)));
}

function renderCode() {
  const request = requestOf(settings(), at("method-1").value, []);
  const origin = location.protocol === "file:" ? "http://127.0.0.1:8000" : location.origin;
  at("curl").textContent = curl(request, origin);
  at("python").textContent = python(request, origin);
}

/** @param {any} state */
function showLab(state) {
  at("lab").hidden = !state;
  if (!state) return;
  at("kill").hidden = !state.actions.includes("kill_speculator");
  at("delay").hidden = !state.actions.includes("set_delay");
  at("kill").disabled = state.speculator !== "running";
  at("delay").setAttribute("aria-pressed", String(state.delay_ms > 0));
  at("delay").textContent = state.delay_ms > 0 ? "Take the 40 ms off again" : "Put 40 ms on the wire";
  page.lab = state;
  tellLab();
  // It comes back by itself: look until it does.
  if (state.speculator !== "running") setTimeout(async () => showLab((await labState()) ?? state), 1000);
}

/** Says how the draft model is. `outrider up` knows whether it runs, the verifier whether it is used. */
function tellLab() {
  const { lab, whyNoDrafts: why } = page;
  if (!lab) return;
  const isUseless = lab.speculator === "running" && why;
  at("lab-state").textContent = `Draft model: ${lab.speculator}${isUseless ? `, but not used: ${why}` : ""}. Wire: ${lab.delay_ms} ms more.`;
}

/** @param {object} action */
async function breakIt(action) {
  try {
    showLab(await act(action));
  } catch (error) {
    at("lab-state").textContent = /** @type {Error} */ (error).message;
  }
}

function setTheme(/** @type {boolean} */ isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  at("theme").textContent = isDark ? "Light" : "Dark";
  touch();
}

function listen() {
  at("form").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    if (page.abort) page.abort.abort();
    else learnt.then(race);
  });
  at("form").addEventListener("input", renderCode);
  at("method-1").addEventListener("change", renderCode);
  at("chat").addEventListener("change", showKind);
  at("reply").addEventListener("click", goOn);
  at("fresh").addEventListener("click", () => {
    page.turns = [];
    at("reply").hidden = true;
    chooseExample(at("example").selectedIndex);
    renderTurns();
    renderCode();
  });
  at("example").addEventListener("change", () => {
    chooseExample(at("example").selectedIndex);
    renderCode();
  });
  at("key").addEventListener("input", () => sessionStorage.setItem("token", at("key").value));
  at("round").addEventListener("input", () => chooseRound(at("round").valueAsNumber));
  for (const radio of document.querySelectorAll("[name=lane]")) {
    radio.addEventListener("change", () => {
      page.shown = Number(/** @type {HTMLInputElement} */ (radio).value);
      page.follows = true;
      touch();
    });
  }
  at("bars").addEventListener("click", (/** @type {MouseEvent} */ event) => chooseRound(roundAt(event)));
  at("bars").addEventListener("pointermove", tellRound);
  at("play").addEventListener("click", playTrees);
  at("save").addEventListener("click", save);
  at("open").addEventListener("change", () => at("open").files[0] && learnt.then(() => open(at("open").files[0])));
  at("pause").addEventListener("click", () => {
    at("pause").textContent = at("pause").textContent === "Pause" ? "Go on" : "Pause";
  });
  for (const type of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(type, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", type === "dragover");
      const file = type === "drop" && /** @type {DragEvent} */ (event).dataTransfer?.files[0];
      if (file) learnt.then(() => open(file));
    });
  }
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(at(/** @type {HTMLElement} */ (button).dataset.of ?? "").textContent);
      at("status").textContent = "Copied.";
    });
  }
  at("kill").addEventListener("click", () => breakIt({ action: "kill_speculator" }));
  at("delay").addEventListener("click", () => breakIt({ action: "set_delay", delay_ms: at("delay").getAttribute("aria-pressed") === "true" ? 0 : 40 }));
  at("theme").addEventListener("click", () => {
    const isDark = !document.documentElement.classList.contains("dark");
    localStorage.setItem("theme", isDark ? "dark" : "light");
    setTheme(isDark);
  });
  window.addEventListener("resize", touch);
}

function playTrees() {
  const isPlaying = at("play").textContent === "Stop";
  at("play").textContent = isPlaying ? "Play" : "Stop";
  if (isPlaying) return;
  const last = page.lanes[page.shown].rounds.length - 1;
  chooseRound(page.round >= last ? 0 : page.round);
  const step = () => {
    if (at("play").textContent !== "Stop") return;
    if (page.round >= page.lanes[page.shown].rounds.length - 1) at("play").textContent = "Play";
    else {
      chooseRound(page.round + 1);
      setTimeout(step, 400);
    }
  };
  setTimeout(step, 400);
}

/** Shows the load of the server, from now on with the token that is typed in. */
function watchLoad() {
  page.watching?.abort();
  page.watching = new AbortController();
  let isFirst = true;
  const take = (/** @type {any} */ load) => {
    if (load.error) {
      describe(at("load"), [["Server", load.error.message]]);
      return;
    }
    describe(at("load"), wordsOf(load));
    page.whyNoDrafts = whyNoDrafts(load);
    tellLab();
    page.model = { id: load.model.id, dtype: load.model.dtype };
    at("model").textContent = `${load.model.id}, ${load.model.dtype}`;
    if (!isFirst) return;
    isFirst = false;
    SIDES.forEach((side) => setMethods(side, load.methods, at(`method-${side}`).value));
    at("chat").checked = load.model.is_chat;
    showKind();
    renderCode();
  };
  watch(take, at("key").value, page.watching.signal);
}

const learnt = learnMethods();

async function start() {
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const chosen = localStorage.getItem("theme");
  page.isDirty = false;
  setTheme(chosen ? chosen === "dark" : prefers.matches);
  showKind();
  at("key").value = sessionStorage.getItem("token") ?? "";
  listen(); // before the methods are there: what is clicked or opened meanwhile waits for them
  await learnt;
  setMethods(0, methodNames(), "off");
  setMethods(1, methodNames(), "auto");
  renderCode();
  const recorded = document.getElementById("recording");
  if (recorded) {
    for (const id of ["go", "code"]) at(id).hidden = true;
    replay(parse(recorded.textContent ?? ""));
    return;
  }
  watchLoad();
  at("key").addEventListener("change", watchLoad);
  showLab(await labState());
}

start();
