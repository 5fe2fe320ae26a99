"""The tiers in Redis or Valkey: client, keys, commands."""
