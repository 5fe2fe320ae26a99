// What the server has to do, twice a second, and what it is.

import { events } from "./api.js";
import { shortened } from "./cutting.js";

const PAUSE_MS = 2000;

/**
 * Listens to the server's load until it is told to stop.
 * @param {(load: any) => void} take Takes a load, or { error } while there is none.
 * @param {string} token What the server may want; empty = none.
 * @param {AbortSignal} signal
 */
export async function watch(take, token, signal) {
  while (!signal.aborted) {
    try {
      for await (const load of events("/page/load", {}, { token, signal })) take(load);
    } catch (error) {
      if (!signal.aborted) take({ error });
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

/** @param {any} peer @returns {string} */
function stateOf(peer) {
  return peer.connected ? "connected" : peer.last_error ? `away: ${shortened(peer.last_error, 120)}` : "not used yet";
}

/**
 * Returns why no draft model can be used, as the verifier has it; empty if one can, or none was needed yet.
 * @param {any} load
 * @returns {string}
 */
export function whyNoDrafts(load) {
  const peers = load.speculators ?? [];
  const isThere = peers.some((/** @type {any} */ peer) => peer.connected || !peer.last_error);
  return isThere ? "" : [...new Set(peers.map((/** @type {any} */ peer) => peer.last_error))].join("; ");
}

/**
 * Returns a load in words.
 * @param {any} load
 * @returns {[string, string][]}
 */
export function wordsOf(load) {
  const pool = load.kv_pool ?? {};
  const held = pool.num_tokens ? `${Math.round((100 * (pool.num_held_tokens ?? 0)) / pool.num_tokens)} % of ${pool.num_tokens} tokens` : "none";
  const speculators = (load.speculators ?? []).map(stateOf);
  return [
    ["Sessions", `${load.num_sessions ?? 0} of ${load.max_num_sessions ?? "?"}`],
    ["Queue", String(load.num_queued ?? 0)],
    ["Memory pool", held],
    ["Draft model", speculators.join(", ") || "none"],
    ["Datastore", load.datastore ? stateOf(load.datastore) : "none"],
    ["Requests", String(load.num_requests ?? 0)],
  ];
}
