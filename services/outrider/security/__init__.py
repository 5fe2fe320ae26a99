"""Who may talk to whom, and how much: TLS, credentials, tenants and their limits."""
