"""The edge: a speculator beside the application that dials the cloud's verifier."""
