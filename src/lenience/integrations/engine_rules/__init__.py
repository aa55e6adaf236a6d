"""Decisions of rules on windows that a serving engine has drafted, without any engine."""
