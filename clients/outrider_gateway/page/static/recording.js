// A race as a file: every event with its time. Played again, the page shows the same.

const FORMAT = "outrider-recording";

/**
 * @typedef {object} Recording
 * @property {string} format
 * @property {number} version
 * @property {{id: string, dtype: string}} model
 * @property {import("./api.js").Settings} settings
 * @property {boolean} isAtOnce
 * @property {{method: string, startMs: number, events: [number, object][]}[]} lanes - Times count from the lane's start.
 */

/**
 * @param {Omit<Recording, "format" | "version">} race
 * @returns {Recording}
 */
export function recordingOf(race) {
  return { format: FORMAT, version: 1, ...race };
}

/**
 * Reads a recording.
 * @param {string} text
 * @returns {Recording}
 * @throws {Error} It is none, in words for the user.
 */
export function parse(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (found?.format !== FORMAT || !Array.isArray(found.lanes) || found.lanes.length !== 2 || !found.settings) {
    throw new Error("This file is not a recording of this page.");
  }
  if (found.version !== 1) throw new Error(`This page reads version 1 of recordings, the file has version ${found.version}.`);
  return found;
}

/** Hands a recording's events out when their time has come. The caller says how much time passes. */
export class Player {
  /** @param {Recording} recording */
  constructor(recording) {
    this.recording = recording;
    this.nowMs = 0;
    this.next = recording.lanes.map(() => 0);
  }

  /**
   * @param {number} ms - Time that has passed, at the pace of the recording.
   * @param {(lane: number, event: object, atMs: number) => void} take
   */
  advance(ms, take) {
    this.nowMs += ms;
    this.recording.lanes.forEach((lane, index) => {
      while (this.next[index] < lane.events.length) {
        const [atMs, event] = lane.events[this.next[index]];
        if (lane.startMs + atMs > this.nowMs) break;
        this.next[index]++;
        take(index, event, atMs);
      }
    });
  }

  /** @returns {boolean} */
  get isOver() {
    return this.recording.lanes.every((lane, index) => this.next[index] >= lane.events.length);
  }
}
