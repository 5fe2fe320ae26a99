"""Models of the Hugging Face hub: found, fetched, checked."""
