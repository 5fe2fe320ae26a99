"""Pure logic on token ids: no torch, grpc, redis, clock or global randomness."""
