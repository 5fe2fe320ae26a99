// Breaking the server on purpose, where the gateway offers it.

/** @returns {Promise<any>} The state, or null where nothing can be broken. */
export async function state() {
  const response = await fetch("/page/lab").catch(() => null);
  const found = response?.ok ? await response.json() : null;
  return found?.actions?.length ? found : null;
}

/**
 * @param {object} action
 * @returns {Promise<any>} The new state.
 * @throws {Error} The server's words.
 */
export async function act(action) {
  const response = await fetch("/page/lab", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(action),
  });
  const answer = await response.json();
  if (!response.ok || answer.error) throw new Error(answer.error?.message ?? answer.error ?? "That did not work.");
  return answer;
}
