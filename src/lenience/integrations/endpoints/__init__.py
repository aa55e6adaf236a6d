"""Servers with OpenAI's API as an engine: a reference and candidates that are compared with it."""
