"""The HTTP server of `amusd serve`: OpenAI's protocol over an engine (docs/serving.md)."""
