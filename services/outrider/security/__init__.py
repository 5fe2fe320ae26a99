"""TLS, credentials, tenants and their limits: they decide who may talk to whom, and how much."""
