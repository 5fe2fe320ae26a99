"""The edge: a speculator next to the application that dials the cloud's verifier."""
