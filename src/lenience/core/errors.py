"""Exceptions for wrong input and failed runs. No torch."""


class InputError(ValueError):
    """Wrong input. The message is one line that names the thing and the fix; the command line exits
    with 2."""


class RunError(RuntimeError):
    """A run that failed for a reason other than its input. The message is one line; the command
    line exits with 1."""


class TooLong(InputError):
    """A prompt that leaves a model no room for an answer."""


def reason(error: BaseException) -> str:
    """Return the cause of an error without the file name, as in "No such file or directory"."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for one-line messages; the error's type if there
    is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
