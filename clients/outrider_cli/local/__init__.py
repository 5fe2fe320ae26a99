"""Services on this machine: processes, a Redis, and the stack of all of them."""
