"""Run model-written programs in a sandbox.

Programs have no network, no files but Python's and their own folder, no child processes, and
bounded time, memory and output.

There are two kinds of sandbox, each probed before use: namespaces (bubblewrap) or, if a container
forbids namespaces, Landlock with dropped privileges and nothing to write to. In both, seccomp
refuses sockets, signals to other processes, new processes, and other calls that solutions do not
need. Expected answers never enter the program's process.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lenience.core.errors import InputError
from lenience.tasks import sandboxed

SandboxKind = Literal["bubblewrap", "landlock", "none"]
Status = Literal["ended", "timeout", "too much output"]
CHILD = Path(sandboxed.__file__)
EXTRA = "pip install 'lenience[code]'"
FOLDER_BYTES = 64 << 20
"""Maximum number of bytes in a program's folder, which is in memory."""
# fmt: off
REFUSED = (
    "socket", "bind", "connect", "listen", "accept", "accept4", "sendto", "sendmsg", "sendmmsg",
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open",
    "pidfd_send_signal", "pidfd_getfd", "fork", "vfork", "ptrace", "process_vm_readv",
    "process_vm_writev", "kcmp", "unshare", "setns", "mount", "umount2", "pivot_root", "chroot",
    "move_mount", "open_tree", "fsopen", "fsmount", "setuid", "setgid", "setreuid", "setregid",
    "setresuid", "setresgid", "setgroups", "capset", "bpf", "perf_event_open", "userfaultfd",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key", "request_key",
    "open_by_handle_at", "name_to_handle_at", "memfd_create", "memfd_secret", "shmget", "shmat",
    "msgget", "semget", "mq_open", "init_module", "finit_module", "delete_module", "kexec_load",
    "reboot", "swapon", "swapoff", "acct", "sched_setaffinity", "sched_setscheduler",
    "setpriority", "ioprio_set", "mknod", "mknodat", "sched_setparam", "sched_setattr",
    "migrate_pages", "move_pages", "process_madvise", "process_mrelease",
    "shmctl", "semctl", "semop", "semtimedop", "msgctl", "msgsnd", "msgrcv", "mq_unlink", "syslog",
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime",
    "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr",
    "lremovexattr", "fremovexattr", "setxattrat", "removexattrat", "truncate",
)
# fmt: on
"""System calls that no solution of a problem needs."""
CLONE_THREAD = 0x10000
SIGNALLING = (8, 10, 15)
"""Commands F_SETOWN, F_SETSIG and F_SETOWN_EX of fcntl, by which a stream signals a process."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program."""

    seconds: float = 10.0
    """Time limit in seconds, for a whole run or per call."""
    memory: int = 1 << 30
    """Bytes of address space."""
    output: int = 1 << 20
    """Maximum number of bytes on each standard stream."""

    def rlimits(self, calls: int) -> dict[str, int]:
        """Return the limits of a process that may take `seconds` for each of `calls` calls."""
        return {
            "RLIMIT_AS": self.memory,
            "RLIMIT_CPU": int(self.seconds * calls) + 2,
            "RLIMIT_FSIZE": FOLDER_BYTES,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class ProgramResult:
    """The exit and the output of a program."""

    status: Status
    code: int
    out: str = ""
    err: str = ""


@dataclass(frozen=True)
class TestVerdict:
    """A program's outcome: "passed", "wrong answer", "timeout", "crash", "missing function" or "too
    much output", with details."""

    kind: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.kind == "passed"

    def __str__(self) -> str:
        """Return one line without control characters."""
        text = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return "".join(char if char.isprintable() else " " for char in text)


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox; "none" is for users who accept the risk."""

    kind: SandboxKind

    def run(
        self, program: str, given: str = "", limits: Limits = Limits()
    ) -> ProgramResult:
        """Run a script with `given` as its standard input."""
        with self._started("main", program, limits) as process:
            return _exchange(process, given.encode("utf-8", "replace"), limits)

    def calls(
        self,
        program: str,
        entry: str,
        arguments: Sequence[Sequence[Any]],
        limits: Limits,
    ) -> Iterator[Any | TestVerdict]:
        """Call the function `entry` of a program with each list of arguments, in one process. Yield
        each result; a TestVerdict in its place ends the calls."""
        count = len(arguments) + 1
        with self._started(
            "calls", program, limits, entry=entry, calls=count
        ) as process:
            replies = _Replies(process, limits)
            ready = replies.next()
            if isinstance(ready, TestVerdict):
                yield ready
                return
            for given in arguments:
                replies.ask(sandboxed.encode(list(given)))
                answer = replies.next()
                yield answer
                if isinstance(answer, TestVerdict):
                    return

    def check(
        self, program: str, entry: str, tests: str, limits: Limits = Limits()
    ) -> TestVerdict:
        """Return the verdict of trusted `tests`, code that defines `check(candidate)`, on the
        function `entry` of `program`. The tests run in a separate sandbox, which the program cannot
        inspect. Raises InputError if the tests cannot be run."""
        asked_read, asked_write = os.pipe()
        told_read, told_write = os.pipe()
        ends = {asked_read, asked_write, told_read, told_write}
        try:
            candidate = self._started(
                "calls", program, limits, entry=entry, streams=(asked_read, told_write)
            )
            fds = {"calls": asked_write, "replies": told_read}
            referee = self._started("referee", tests, limits, entry=entry, fds=fds)
            with candidate, referee as process:
                while ends:  # else neither side would notice that the other has ended
                    os.close(ends.pop())
                ended = _exchange(process, b"", limits)
        finally:
            for end in ends:
                os.close(end)
        if ended.status != "ended":
            return TestVerdict(ended.status)
        try:
            verdict = TestVerdict(*json.loads(ended.out))
        except (ValueError, TypeError):
            raise RuntimeError(
                f"the sandbox's referee failed: {ended.err[-300:]}"
            ) from None
        if verdict.kind == "broken tests":
            raise InputError(f"its tests cannot be run: {verdict.detail}")
        return verdict

    @contextmanager
    def _filter(self) -> Iterator[int]:
        """Provide the descriptor of a file with the filter of system calls; -1 without a filter."""
        if self.kind == "none":
            yield -1
            return
        with _content(_refused_calls()) as file:
            yield file

    @contextmanager
    def _started(
        self,
        mode: str,
        program: str,
        limits: Limits,
        *,
        fds: dict[str, int] | None = None,
        streams: tuple[int, int] | None = None,
        calls: int = 1,
        **asked: Any,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Provide a process in the sandbox, and kill it with its children afterwards."""
        fds = dict(fds or {})
        with (
            _content(program.encode("utf-8", "surrogatepass")) as file,
            self._filter() as refused,
        ):
            fds["program"] = file
            confine = None
            if self.kind == "landlock":
                confine = {
                    "readable": _readable(),
                    "filter": refused,
                    "user": _user_for_python(),
                }
                fds["filter"] = refused
            asked |= {"mode": mode, "limits": limits.rlimits(calls), "confine": confine}
            asked |= {name: fds[name] for name in fds if name != "filter"}
            command = [*_python(), str(CHILD), json.dumps(asked)]
            if self.kind == "bubblewrap":
                fds["filter"] = refused
                command = [*_bubblewrap(refused), *command]
            stdin, stdout = streams or (subprocess.PIPE, subprocess.PIPE)
            with (
                tempfile.TemporaryDirectory()
                if self.kind == "none"
                else _nowhere() as folder
            ):
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=subprocess.DEVNULL if streams else subprocess.PIPE,
                    pass_fds=tuple(fds.values()),
                    cwd=folder,
                    env={"PATH": "/usr/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                    start_new_session=True,
                )
                try:
                    yield process
                finally:
                    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
    process.wait()


@contextmanager
def _nowhere() -> Iterator[str]:
    yield "/"


@contextmanager
def _content(content: bytes) -> Iterator[int]:
    """Provide an unnamed file with the given content, open at its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


@cache
def _refused_calls() -> bytes:
    """Return the filter of refused system calls as a BPF program. Raises InputError without
    pyseccomp."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"task: programs run in a sandbox, which needs {EXTRA} ({error})"
        ) from None
    refused = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in REFUSED:
        with suppress(
            OSError, ValueError
        ):  # this kernel's architecture has no such call
            refused.add_rule(pyseccomp.ERRNO(1), name)
    threads = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_THREAD, 0)
    refused.add_rule(pyseccomp.ERRNO(1), "clone", threads)
    of_others = pyseccomp.Arg(0, pyseccomp.NE, 0)
    refused.add_rule(pyseccomp.ERRNO(1), "prlimit64", of_others)
    for command in SIGNALLING:
        owner = pyseccomp.Arg(1, pyseccomp.EQ, command)
        refused.add_rule(pyseccomp.ERRNO(1), "fcntl", owner)
    # PR_SET_PDEATHSIG, which has been set before the filter applies
    on_death = pyseccomp.Arg(0, pyseccomp.EQ, 1)
    refused.add_rule(pyseccomp.ERRNO(1), "prctl", on_death)
    # ENOSYS makes glibc call clone, whose flags the filter sees
    refused.add_rule(pyseccomp.ERRNO(38), "clone3")
    with tempfile.TemporaryFile() as file:
        refused.export_bpf(file)
        file.seek(0)
        return file.read()


def _python() -> list[str]:
    """Return the command of the interpreter, without site packages and without the script's folder
    on its path."""
    executable = getattr(sys, "_base_executable", sys.executable)
    return [os.path.realpath(executable), "-B", "-S", "-s", "-P"]


def _readable() -> list[str]:
    """Return the files and folders that Python itself reads, and none of a user's."""
    usual = [
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/etc/ld.so.cache",
        "/dev/null",
        "/dev/urandom",
    ]
    paths = [*usual, sys.base_prefix, str(CHILD)]
    return [path for path in paths if os.path.exists(path)]


@cache
def _user_for_python() -> bool:
    """Return True if any user may run this Python, as it is in no private folder."""
    return all(parent.stat().st_mode & 0o001 for parent in Path(_python()[0]).parents)


def _bubblewrap(refused: int) -> list[str]:
    """Return the bubblewrap command, to which the command to run is appended."""
    command = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
    ]
    command += [
        "--seccomp",
        str(refused),
        "--cap-drop",
        "ALL",
        "--uid",
        "65534",
        "--gid",
        "65534",
    ]
    for path in _readable():
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            bind = "--dev-bind" if path.startswith("/dev/") else "--ro-bind"
            command += [bind, path, path]
    command += ["--size", str(FOLDER_BYTES), "--tmpfs", "/box", "--chdir", "/box"]
    command += [
        "--remount-ro",
        "/",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
        "--setenv",
        "HOME",
        "/box",
    ]
    return [*command, "--setenv", "LANG", "C.UTF-8", "--"]


def _exchange(
    process: subprocess.Popen[bytes], given: bytes, limits: Limits
) -> ProgramResult:
    """Write to a process and read its output until it ends or exceeds its limits."""
    assert process.stdin and process.stdout and process.stderr
    deadline = time.monotonic() + limits.seconds
    written: dict[Any, bytearray] = {
        process.stdout: bytearray(),
        process.stderr: bytearray(),
    }
    status = _read_both(process, given, written, deadline, limits.output)
    if status == "ended":
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "timeout"
    out, err = (
        part[: limits.output].decode("utf-8", "replace") for part in written.values()
    )
    code = -1 if process.returncode is None else process.returncode
    return ProgramResult(status, code, out, err)


def _read_both(
    process: subprocess.Popen[bytes],
    given: bytes,
    written: dict[Any, bytearray],
    deadline: float,
    most: int,
) -> Status:
    """Write `given` to a process and fill `written` until both of its output streams close. Return
    how this ended."""
    assert process.stdin
    left = memoryview(given)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        for stream in written:
            ready.register(stream, selectors.EVENT_READ)
        ready.register(process.stdin, selectors.EVENT_WRITE)
        while any(stream in ready.get_map() for stream in written):
            events = ready.select(max(0.0, deadline - time.monotonic()))
            if not events and time.monotonic() >= deadline:
                return "timeout"
            for key, _ in events:
                if key.fileobj is process.stdin:
                    left = _feed(process, ready, left)
                    continue
                part = os.read(key.fd, 1 << 16)
                written[key.fileobj] += part
                if not part:
                    ready.unregister(key.fileobj)
                if len(written[key.fileobj]) > most:
                    return "too much output"
    return "ended"


def _feed(
    process: subprocess.Popen[bytes], ready: selectors.BaseSelector, left: memoryview
) -> memoryview:
    """Write a part of a process's remaining input; close the input at its end."""
    assert process.stdin
    try:
        if left:
            left = left[os.write(process.stdin.fileno(), left[: 1 << 16]) :]
    except BrokenPipeError:
        left = left[:0]
    if not left:
        ready.unregister(process.stdin)
        with suppress(BrokenPipeError):
            process.stdin.close()
    return left


class _Replies:
    """The replies of a process that answers calls, line by line."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits):
        assert process.stdin and process.stdout
        self._to = process.stdin
        self._from = process.stdout
        self._limits = limits
        self._read = bytearray()
        self._waiting = memoryview(b"")
        """Part of a call that the process has not read yet."""
        os.set_blocking(self._to.fileno(), False)

    def ask(self, content: Any) -> None:
        self._waiting = memoryview(json.dumps(content).encode() + b"\n")

    def next(self) -> Any | TestVerdict:
        """Return the next value, or the verdict if there is none."""
        deadline = time.monotonic() + self._limits.seconds
        while b"\n" not in self._read:
            if len(self._read) > sandboxed.LONGEST_LINE:
                return TestVerdict("too much output")
            why = self._wait(deadline - time.monotonic())
            if why:
                return why
        line, _, self._read = self._read.partition(b"\n")
        return _reply(bytes(line))

    def _wait(self, seconds: float) -> TestVerdict | None:
        """Wait until data was written or read. Return a verdict if the process is late or has
        ended."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._from, selectors.EVENT_READ)
            if self._waiting:
                ready.register(self._to, selectors.EVENT_WRITE)
            events = ready.select(max(0.0, seconds))
        if not events:
            return TestVerdict("timeout")
        for key, _ in events:
            if key.fileobj is self._to:
                try:
                    self._waiting = self._waiting[
                        os.write(key.fd, self._waiting[: 1 << 16]) :
                    ]
                except BrokenPipeError:
                    self._waiting = self._waiting[:0]
                continue
            part = os.read(key.fd, 1 << 16)
            if not part:
                return TestVerdict("crash", "it ended without an answer")
            self._read += part
        return None


def _reply(line: bytes) -> Any | TestVerdict:
    try:
        content = json.loads(line)
        if "missing" in content:
            return TestVerdict("missing function", str(content["missing"]))
        if "raised" in content:
            return TestVerdict("crash", str(content["raised"])[-300:])
        return True if "ready" in content else sandboxed.decode(content["value"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return TestVerdict("wrong answer", f"unreadable: {error!r}")


PROBE = "import os\nprint(sum(map(int, input().split())), os.getcwd())"
"""Program that shows whether a sandbox works here."""


def probe(kind: SandboxKind) -> str:
    """Run a small program in a sandbox. Return the reason of a failure; "" if it worked."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        ended = Sandbox(kind).run(PROBE, "1 2\n", Limits(seconds=30.0))
    except OSError as error:
        return str(error)
    if ended.out.startswith("3 "):
        return ""
    return (ended.err.strip().splitlines() or [ended.status])[-1][:120]


@cache
def sandbox(unsafe_local: bool = False) -> Sandbox:
    """Return the first kind of sandbox that works here. With `unsafe_local`, programs run as this
    user without a sandbox. Raises InputError if no kind works."""
    if os.name != "posix":
        raise InputError("task: model-written programs need Linux or another Unix")
    if unsafe_local:
        return Sandbox("none")
    why = []
    kinds: tuple[SandboxKind, ...] = ("bubblewrap", "landlock")
    for kind in kinds:
        fault = probe(kind)
        if not fault:
            return Sandbox(kind)
        why.append(f"{kind}: {fault}")
    raise InputError(
        f"task: model-written programs cannot be sandboxed here ({'; '.join(why)}); "
        "install bubblewrap, or accept the risk with --unsafe-local"
    )


def workers() -> int:
    """Return the number of programs to run at once: one per available core."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
