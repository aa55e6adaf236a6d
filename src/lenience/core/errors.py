"""Exceptions for wrong input and failed runs. No torch."""


class InputError(ValueError):
    """Wrong input. The message is one line that names the thing and the fix; the command line exits
    with 2."""


class RunError(RuntimeError):
    """A run that failed for a reason other than its input. The message is one line; the command
    line exits with 1."""


class TooLong(InputError):
    """A prompt leaves a model no room for an answer."""


def reason(error: BaseException) -> str:
    """Return why a file could not be opened, without its name."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    """Return an error's message cut to its first line, for messages of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
