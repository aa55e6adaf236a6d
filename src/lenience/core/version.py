"""The version of lenience; pyproject.toml reads it here."""

VERSION = "0.2.0"
