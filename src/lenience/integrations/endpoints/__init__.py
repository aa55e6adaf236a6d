"""Servers with OpenAI's API as an engine: a reference and candidates that are compared with it."""

from lenience.integrations.endpoints.endpoint import Endpoint
from lenience.integrations.endpoints.pair import ServedOptions, ServedPair

__all__ = ["Endpoint", "ServedOptions", "ServedPair"]
