"""The program inside a sandbox, which runs model-written code.

It runs as a file, by any Python 3.8 or later, with the standard library only.

Its first argument is JSON: `mode`, `program` (a file descriptor to read it from), `limits` (names
of rlimits and values), `confine` (settings with which the process confines itself; null if a
sandbox surrounds it) and further fields of the mode.

Modes: "main" runs the program as a script; "calls" answers calls of one of its functions, a JSON
line each; "referee" runs trusted tests against a function in another sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
import sys
import traceback

TYPE_CHECKING = False  # not from typing, whose import would slow down each start
if TYPE_CHECKING:
    from typing import Any

LONGEST_LINE = 1 << 22
"""Characters of the longest reply."""
TAGS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
# Landlock (linux/landlock.h); its numbers are the same on all architectures
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
BENEATH_PATH = 1
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
RIGHTS_BY_ABI = (0, 13, 14, 15, 15, 16)
"""Number of file rights in each version; later versions have as many as the last."""
SET_NO_NEW_PRIVS = 38
SET_SECCOMP = 22
CAPBSET_DROP = 24
SET_DUMPABLE = 4
SET_PDEATHSIG = 1
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522
NOBODY = 65534


def encode(value: Any) -> Any:
    """Return a value in JSON; values without a JSON form are tagged."""
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return {"int": str(int(value))} if abs(value) >> 63 else int(value)
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, list):
        return list(map(encode, value))
    for tag, kind in TAGS.items():
        if isinstance(value, kind):
            return {tag: list(map(encode, value))}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    return {"object": type(value).__name__}


def decode(value: Any) -> Any:
    """Return the argument of `encode` from its result; an object without a form becomes a unique
    object, equal to none."""
    if isinstance(value, list):
        return list(map(decode, value))
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in TAGS:
        return TAGS[tag](decode(content))
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    if tag == "complex":
        return complex(float(content[0]), float(content[1]))
    if tag == "object":
        return object()
    plain: dict[str, Any] = {"int": int, "float": float, "bytes": bytes.fromhex}
    return plain[tag](content)


def run_main(program: str, asked: dict[str, Any]) -> None:
    """Run the program as a script with the process's standard streams. It may end by sys.exit."""
    space = {"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}
    with contextlib.suppress(SystemExit):
        exec(compile(program, "program.py", "exec"), space)


def answer_calls(program: str, asked: dict[str, Any]) -> None:
    """Read calls from standard input and reply on standard output. The program itself finds
    /dev/null in their place."""
    calls = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        space: dict[str, Any] = {"__name__": "solution"}
        exec(compile(program, "program.py", "exec"), space)
        function = _function(space, asked["entry"])
    except BaseException as error:
        reply(_raised(error))
        return
    if function is None:
        reply({"missing": asked["entry"]})
        return
    reply({"ready": True})
    for line in calls:
        try:
            content = {"value": encode(function(*decode(json.loads(line))))}
        except BaseException as error:
            content = _raised(error)
        reply(content)


def _function(space: dict[str, Any], entry: str) -> Any:
    """Return a function of the program, or a method of its class Solution."""
    if callable(space.get(entry)):
        return space[entry]
    solution = space.get("Solution")
    return getattr(solution(), entry, None) if isinstance(solution, type) else None


def _raised(error: BaseException) -> dict[str, str]:
    return {
        "raised": "".join(traceback.format_exception_only(type(error), error)).strip()[
            -300:
        ]
    }


class Failed(BaseException):
    """The function under test did not answer a call."""


def judge_by_tests(program: str, asked: dict[str, Any]) -> None:
    """Run tests whose `check` receives a stand-in that calls the function in the other sandbox."""
    calls = os.fdopen(asked["calls"], "w")
    replies = os.fdopen(asked["replies"])

    def answer() -> Any:
        line = replies.readline(LONGEST_LINE)
        if not line.endswith("\n"):
            raise Failed(
                "too much output" if line else "crash", "it ended without an answer"
            )
        try:
            content = json.loads(line)
            if "missing" in content:
                raise Failed("missing function", content["missing"])
            if "raised" in content:
                raise Failed("crash", str(content["raised"])[-300:])
            return content if "ready" in content else decode(content["value"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Failed("wrong answer", f"unreadable: {error!r}") from None

    def candidate(*args: Any) -> Any:
        try:
            calls.write(json.dumps(encode(list(args))) + "\n")
            calls.flush()
        except BrokenPipeError:
            raise Failed("crash", "it ended before a call") from None
        return answer()

    try:
        space: dict[str, Any] = {"__name__": "tests"}
        try:
            exec(compile(program, "tests.py", "exec"), space)
            check = space["check"]
        except Exception as error:
            raise Failed("broken tests", _raised(error)["raised"]) from None
        answer()
        space[asked["entry"]] = candidate  # tests may call it by its own name
        check(candidate)
        verdict = ["passed", ""]
    except Failed as failed:
        verdict = list(failed.args)
    except BaseException as error:
        verdict = ["wrong answer", _raised(error)["raised"]]
    os.write(1, json.dumps(verdict).encode())


def confine(asked: dict[str, Any]) -> None:
    """Confine this process: only readable files (Landlock), no privileges (capabilities), and a
    filter of system calls (seccomp). Raises OSError if the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, SET_NO_NEW_PRIVS, 1)
    _landlock(libc, asked["readable"])
    if os.geteuid() == 0:
        _drop_privileges(libc, asked["user"])
    _prctl(libc, SET_DUMPABLE, 0)
    _prctl(libc, SET_PDEATHSIG, 9)  # ends this process when its parent is killed
    if asked["filter"] is not None:
        with os.fdopen(asked["filter"], "rb") as file:
            program = file.read()
        code = ctypes.create_string_buffer(program)
        filled = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        _prctl(libc, SET_SECCOMP, 2, ctypes.create_string_buffer(filled))


def _landlock(libc: Any, readable: list[str]) -> None:
    abi = _call(libc.syscall, CREATE_RULESET, None, 0, 1)
    rights = (1 << RIGHTS_BY_ABI[min(abi, len(RIGHTS_BY_ABI) - 1)]) - 1
    net = 3 if abi >= 4 else 0
    scopes = 3 if abi >= 6 else 0
    sizes = {1: 8, 2: 8, 3: 8, 4: 16, 5: 16}
    wanted = struct.pack("QQQ", rights, net, scopes)[: sizes.get(abi, 24)]
    rules = _call(libc.syscall, CREATE_RULESET, wanted, len(wanted), 0)
    for path in readable:
        allowed = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        if path == os.devnull:
            allowed |= WRITE_FILE
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, at)
        _call(libc.syscall, *(ADD_RULE, rules, BENEATH_PATH, rule, 0))
        os.close(at)
    _call(libc.syscall, RESTRICT_SELF, rules, 0)
    os.close(rules)


def _drop_privileges(libc: Any, user: bool) -> None:
    """Drop root's privileges; with `user`, become nobody."""
    for capability in range(64):
        with contextlib.suppress(OSError):  # this kernel knows fewer
            _prctl(libc, CAPBSET_DROP, capability)
    os.setgroups([])
    if user:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    head = struct.pack("Ii", CAPABILITY_VERSION, 0)
    number = CAPSET.get(os.uname().machine, CAPSET["aarch64"])
    _call(libc.syscall, number, head, bytes(24))


def _prctl(libc: Any, option: int, *args: Any) -> None:
    _call(libc.prctl, option, *(*args, 0, 0, 0)[:4])


def _call(function: Any, *args: Any) -> int:
    result: int = function(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


MODES = {"main": run_main, "calls": answer_calls, "referee": judge_by_tests}


def main() -> None:
    asked = json.loads(sys.argv[1])
    with os.fdopen(asked["program"], encoding="utf-8", errors="surrogatepass") as file:
        program = file.read()
    import resource  # exists on Unix only; the file is imported everywhere

    for name, value in asked["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if asked["confine"] is not None:
        confine(asked["confine"])
    sys.argv = ["program.py"]
    MODES[asked["mode"]](program, asked)


if __name__ == "__main__":
    main()
