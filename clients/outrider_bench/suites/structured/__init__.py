"""The suite of structured output: masks, schemas, several texts of a prompt, and other things that a request asks."""
