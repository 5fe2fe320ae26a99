"""The load generator: requests that arrive at a rate, and what their senders see of the server."""
