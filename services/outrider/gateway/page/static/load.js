// What the server has to do, twice a second, and what it is.

/**
 * Listens to the server's load.
 * @param {(load: any) => void} take
 * @returns {EventSource}
 */
export function watch(take) {
  const source = new EventSource("/page/load");
  source.addEventListener("load", (event) => {
    const load = JSON.parse(event.data);
    // A server that wants a token tells those alone that have one, and an EventSource cannot send it.
    if (!load.error) take(load);
  });
  return source;
}

/**
 * Returns a load in words.
 * @param {any} load
 * @returns {[string, string][]}
 */
export function wordsOf(load) {
  const pool = load.kv_pool ?? {};
  const held = pool.num_tokens ? `${Math.round((100 * (pool.num_held_tokens ?? 0)) / pool.num_tokens)} % of ${pool.num_tokens} tokens` : "none";
  const speculators = (load.speculators ?? []).map((/** @type {any} */ peer) => (peer.connected ? "connected" : "away"));
  return [
    ["Sessions", `${load.num_sessions ?? 0} of ${load.max_num_sessions ?? "?"}`],
    ["Queue", String(load.num_queued ?? 0)],
    ["Memory pool", held],
    ["Draft model", speculators.join(", ") || "none"],
    ["Datastore", load.datastore ? (load.datastore.connected ? "connected" : "away") : "none"],
    ["Requests", String(load.num_requests ?? 0)],
  ];
}
