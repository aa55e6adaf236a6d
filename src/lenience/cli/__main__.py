"""`python -m lenience.cli` is the command `lenience`."""

from lenience.cli.commands import main

main()
