"""The command line; `main` runs it."""

from lenience.cli.commands import main

__all__ = ["main"]
