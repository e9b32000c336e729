"""The OpenAI-compatible HTTP server over an engine."""
