"""Serving: continuous batching behind OpenAI's API, with a dial for leniency."""
