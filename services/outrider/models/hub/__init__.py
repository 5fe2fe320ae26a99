"""Finds, fetches and checks models of the Hugging Face hub."""
