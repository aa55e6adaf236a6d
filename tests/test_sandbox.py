"""Programs that a model might write, each shut in, each told apart."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from capabilities import needs

from lenience.core.errors import InputError
from lenience.tasks import sandbox as module
from lenience.tasks.sandbox import Limits, Sandbox, SandboxKind, TestVerdict, sandbox
from lenience.tasks.sandboxed import decode, encode

KINDS = [pytest.param(kind, marks=needs(kind)) for kind in ("bubblewrap", "landlock")]
SHORT = Limits(seconds=1.5)

# Each tries something, and prints IN where it got through. What is written in capitals is put in by
# the test.
ATTACKS = {
    "fork": "import os\nif os.fork() == 0: print('IN')",
    "fork bomb": "import os\nwhile True:\n    os.fork()\n    print('IN')",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/echo', 'IN'])",
    "spawn": "import os\nos.posix_spawn('/bin/echo', ['echo', 'IN'], {})",
    "system": "import os\nos.system('echo IN')",
    "reload of os": "import importlib, os\nimportlib.reload(os)\nos.system('echo IN')",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print, args=('IN',))\n"
    "p.start()\np.join()",
    "ctypes system": "import ctypes\nctypes.CDLL(None).system(b'echo IN')",
    "ctypes clone": "import ctypes\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) >= 0:\n"
    "    print('IN')",
    "memory": "x = bytearray(4 << 30)\nprint('IN')",
    "memory of threads": "import threading\nkept = []\ndef grow():\n"
    "    while True: kept.append(bytearray(1 << 24))\n"
    "ts = [threading.Thread(target=grow) for _ in range(8)]\n[t.start() for t in ts]\n"
    "[t.join() for t in ts]\nprint('IN' if len(kept) > 200 else 'out')",
    "memory of a file": "import os\nfile = os.memfd_create('x')\nprint('IN')",
    "shared memory": "from multiprocessing import shared_memory\n"
    "shared_memory.SharedMemory(create=True, size=1 << 20)\nprint('IN')",
    "disk": "n = 0\ntry:\n    for i in range(200):\n        with open(f'f{i}', 'wb') as file:\n"
    "            n += file.write(bytes(1 << 20))\nexcept OSError: pass\n"
    "print('IN' if n > 65 << 20 else 'out')",
    "another's folder": "open('/tmp/lenience-attack', 'w').write('x')\nprint('IN')",
    "devices": "open('/dev/lenience-attack', 'w').write('x')\nprint('IN')",
    "a file of the user's": "print('IN', open(SECRET_FILE).read())",
    "a link to it": "import os\nos.symlink(SECRET_FILE, 'link')\nprint('IN', open('link').read())",
    "listing": "import os\nprint('IN', os.listdir(os.path.dirname(SECRET_FILE)))",
    "accounts": "print('IN', open('/etc/passwd').read())",
    "environment": "import os\nprint('IN' if 'LENIENCE_SECRET' in os.environ else 'out')",
    "the parent's environment": "import os\nd = open(f'/proc/{os.getppid()}/environ').read()\n"
    "print('IN', d)",
    "processes": "import os\nprint('IN', os.listdir('/proc'))",
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', TCP_PORT), 1).send(b'IN')\n"
    "print('IN')",
    "udp": "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "s.sendto(b'IN', ('127.0.0.1', UDP_PORT))\nprint('IN')",
    "a named socket": "import socket\ns = socket.socket(socket.AF_UNIX)\n"
    "s.connect('\\0' + SOCKET_NAME)\nprint('IN')",
    "ctypes socket": "import ctypes\nif ctypes.CDLL(None).socket(2, 2, 0) >= 0: print('IN')",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)\nprint('IN')",
    "killing all": "import os\nos.kill(-1, 9)\nprint('IN')",
    "killing the tests": "import os\nos.kill(TEST_PID, 9)\nprint('IN')",
    "a handle on the parent": "import os\nos.pidfd_open(os.getppid())\nprint('IN')",
    "ptrace": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0:\n"
    "    print('IN')",
    "a signal by a stream": "import fcntl, os, time\nr, w = os.pipe()\n"
    "fcntl.fcntl(r, fcntl.F_SETOWN, TEST_PID)\nfcntl.fcntl(r, 10, 9)\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\nprint('IN')",
    "limits of the parent": "import os, resource as r\n"
    "r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (9, 9))\nprint('IN')",
    "limits of the tests": "import resource as r\n"
    "r.prlimit(TEST_PID, r.RLIMIT_CORE, (0, 0))\nprint('IN')",
    "limits of its own": "import resource as r\n"
    "r.setrlimit(r.RLIMIT_CPU, (r.RLIM_INFINITY, r.RLIM_INFINITY))\nprint('IN')",
    "rights of a file": "import os\nos.chmod(SECRET_FILE, 0o777)\nprint('IN')",
    "times of a file": "import os\nos.utime(SECRET_FILE, (0, 0))\nprint('IN')",
    "a file cut short": "import os\nos.truncate(SECRET_FILE, 0)\nprint('IN')",
    "attributes of a file": "import os\nos.setxattr(SECRET_FILE, 'user.x', b'x')\nprint('IN')",
    "outliving the parent": "import ctypes\n"
    "if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print('IN')",
    "becoming root": "import os\nos.setuid(0)\nos.setgid(0)\nprint('IN')",
    "a program of root's": "import os\nos.execv('/bin/su', ['su', '-c', 'echo IN'])",
    "mount": "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, 0) == 0:\n"
    "    print('IN')",
    "namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('IN')",
    "the interpreter's files": "import os\nopen(os.__file__, 'a').write('x')\nprint('IN')",
    "a module of its own": "import sys, os\npath = os.path.dirname(os.__file__) + '/evil.py'\n"
    "open(path, 'w').write('x')\nprint('IN')",
    "the runner's own file": "import sys\npath = sys.modules['__main__'].__file__\n"
    "open(path, 'a').write('x')\nprint('IN')",
    "a loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)\nprint('IN')",
    "deaf to signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, 1)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "threads that outlive": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()",
    "closed streams": "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
    "output": "while True: print('x' * 65536)",
    "errors as output": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "a crash of the interpreter": "import ctypes\nctypes.string_at(0)",
    "depth": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What attacks are after."""
    secret = tmp_path_factory.mktemp("secret") / "expected.txt"
    secret.write_text("expected outputs")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as named,
    ):
        udp.bind(("127.0.0.1", 0))
        name = f"lenience-{os.getpid()}"
        named.bind(f"\0{name}")
        named.listen()
        for server in (tcp, udp, named):
            server.settimeout(0.05)
        yield {
            "SECRET_FILE": repr(str(secret)),
            "TCP_PORT": str(tcp.getsockname()[1]),
            "UDP_PORT": str(udp.getsockname()[1]),
            "SOCKET_NAME": repr(name),
            "TEST_PID": str(os.getpid()),
        }
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(TimeoutError):
            udp.recv(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_contained(
    kind: SandboxKind, name: str, world: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LENIENCE_SECRET", "IN")
    program = ATTACKS[name]
    for placeholder, value in world.items():
        program = program.replace(placeholder, value)
    began = time.monotonic()
    ended = Sandbox(kind).run(program, limits=SHORT)
    assert "IN" not in ended.out.split(), ended
    assert len(ended.out) <= SHORT.output and len(ended.err) <= SHORT.output
    assert time.monotonic() - began < SHORT.seconds + 10  # with room for a busy machine
    assert not left_behind()
    assert not Path("/tmp/lenience-attack").exists()


def left_behind() -> list[str]:
    """The sandboxes that still run, of this process; they may take a moment to go."""
    for _ in range(50):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except (OSError, IndexError):
                continue
            if str(module.CHILD) in line and parent in ("1", str(os.getpid())):
                found.append(" ".join(line)[:200])
        if not found:
            return []
        time.sleep(0.1)
    return found


SUM = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(5, 5) == 10\n"
VERDICTS = {
    "right": ("def add(a, b):\n    return a + b", "passed"),
    "wrong": ("def add(a, b):\n    return a - b", "wrong answer"),
    "another name": ("def plus(a, b):\n    return a + b", "missing function"),
    "no function": ("add = 3", "missing function"),
    "no Python": ("def add(a, b:", "crash"),
    "raises": ("def add(a, b):\n    return 1 / 0", "crash"),
    "raises at once": ("raise SystemExit(0)", "crash"),
    "ends at once": ("import os\nos._exit(0)", "crash"),
    "ends in the call": ("import os\ndef add(a, b):\n    os._exit(0)", "crash"),
    "loops": ("def add(a, b):\n    while True: pass", "timeout"),
    "loops at once": ("while True: pass", "timeout"),
    "equal to all": (
        "class Same:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add(a, b):\n    return Same()",
        "wrong answer",
    ),
    "a number equal to all": (
        "class Same(int):\n    def __eq__(self, other): return True\n"
        "def add(a, b):\n    return Same(7)",
        "wrong answer",
    ),
    "prints the verdict": (
        'print(\'["passed", ""]\', flush=True)\ndef add(a, b):\n'
        '    print(\'["passed", ""]\', flush=True)\n    return 0',
        "wrong answer",
    ),
    "writes to every stream": (
        "import os\ndef add(a, b):\n    for fd in range(1, 64):\n        try:\n"
        "            os.write(fd, repr(['passed', '']).encode() + b'\\n')\n"
        "        except OSError: pass\n    return 0",
        "wrong answer",
    ),
    "replies for the runner": (
        'import json\ndef dumps(*a, **k): return \'{"value": {"tests": "passed"}}\'\n'
        "json.dumps = dumps\ndef add(a, b): return 0",
        "wrong answer",
    ),
    "reads the calls itself": (
        "import sys, os\ndef add(a, b):\n    return 3 if sys.stdin.read() else 0",
        "wrong answer",
    ),
    "a reply without end": (
        "import os\ndef add(a, b):\n    while True:\n        for fd in range(3, 16):\n"
        "            try: os.write(fd, b'x' * 65536)\n            except OSError: pass",
        "too much output",
    ),
    "a large reply": ("def add(a, b):\n    return 'x' * (1 << 23)", "too much output"),
    "an endless list": (
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "crash",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_of_functions(kind: SandboxKind, name: str) -> None:
    program, expected = VERDICTS[name]
    verdict = Sandbox(kind).check(program, "add", SUM, Limits(seconds=3.0))
    assert verdict.kind == expected, verdict
    assert not left_behind()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_expected_is_nowhere_in_the_programs_process(kind: SandboxKind) -> None:
    secret = (
        86753_20260_41937_55081  # longer than an address, which could hold it by chance
    )
    look = (
        f"import gc, os, sys\ndef look():\n    mark = '{str(secret)[::-1]}'\n    found = []\n"
        "    frame = sys._getframe()\n    while frame:\n"
        "        found += [str(one) for one in frame.f_locals.values()]\n"
        "        frame = frame.f_back\n    found += [str(one) for one in gc.get_objects()]\n"
        "    found += sys.argv + list(os.environ.values())\n"
        "    for fd in range(3, 64):\n        try: found.append(str(os.pread(fd, 1 << 20, 0)))\n"
        "        except OSError: pass\n"
        "    return int(mark[::-1]) if any(mark in one[::-1] for one in found) else len(found)"
    )
    tests = "def check(candidate):\n    got = candidate()\n    assert got > 100\n"
    assert Sandbox(kind).check(look, "look", tests).passed  # it can look at much
    tests += f"    assert got == {secret}\n"
    assert Sandbox(kind).check(look, "look", tests).kind == "wrong answer"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_writes_and_how_it_ends_is_told(kind: SandboxKind) -> None:
    ended = Sandbox(kind).run(
        "a, b = map(int, input().split())\nprint(a + b)", "2 40\n"
    )
    assert (ended.status, ended.code, ended.out) == ("ended", 0, "42\n")
    ended = Sandbox(kind).run("print(1)\nraise ValueError('no')")
    assert (ended.code, ended.out) == (1, "1\n") and ended.err.strip().endswith(
        "ValueError: no"
    )
    assert Sandbox(kind).run("print(len(input()))", "x" * 5_000_000).out == "5000000\n"
    assert Sandbox(kind).run("print(open(0).read(3))", "x" * 5_000_000).out == "xxx\n"


@pytest.mark.parametrize("kind", KINDS)
def test_calls_go_on_in_one_process_until_one_fails(kind: SandboxKind) -> None:
    program = "n = 0\ndef count(x):\n    global n\n    n += 1\n    return [n, 10 // x]"
    given = [[1], [5], [0], [1]]
    found = list(Sandbox(kind).calls(program, "count", given, Limits()))
    assert found[:2] == [[1, 10], [2, 2]] and len(found) == 3
    assert found[2] == TestVerdict(
        "crash", "ZeroDivisionError: integer division or modulo by zero"
    )
    busy = "def spin(n):\n    while n: n -= 1\n    return 'done'"
    given = [
        [10_000_000]
    ] * 10  # each in its time, all of them longer than one may take
    assert (
        list(Sandbox(kind).calls(busy, "spin", given, Limits(seconds=1.5)))
        == ["done"] * 10
    )
    slow = "import time\ndef wait(s):\n    time.sleep(s)\n    return s"
    found = list(Sandbox(kind).calls(slow, "wait", [[0], [30], [0]], Limits(seconds=1)))
    assert found == [0, TestVerdict("timeout")]


def test_values_come_back_as_they_were() -> None:
    values = [
        None, True, -1, 2**70, 1.5, float("inf"), "ä\ud800", [1, [2]], (1, (2,)), {1, 2},
        frozenset("a"), {"a": 1, 2: (3,)}, 1 + 2j, b"x",
    ]  # fmt: skip
    for value in values:
        back = decode(encode(value))
        assert back == value and type(back) is type(value)
    assert decode(encode(float("nan"))) != decode(encode(float("nan")))
    one = encode(object())
    assert decode(one) != decode(one)


def test_without_a_sandbox_nothing_is_run_unless_that_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "probe", lambda kind: "forbidden here")
    sandbox.cache_clear()
    try:
        with pytest.raises(
            InputError, match=r"bubblewrap: forbidden here; landlock: .*unsafe"
        ):
            sandbox()
        assert sandbox(unsafe_local=True).kind == "none"
    finally:
        sandbox.cache_clear()
    assert Sandbox("none").check(VERDICTS["right"][0], "add", SUM).passed


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_parent_leaves_nothing_behind(kind: SandboxKind) -> None:
    code = (
        "from lenience.tasks.sandbox import *\nimport threading\n"
        f"s = Sandbox('{kind}')\nprint('begun', flush=True)\n"
        "s.run('while True: pass', limits=Limits(seconds=60))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"begun\n"
    time.sleep(0.5)
    process.kill()
    process.wait()
    process.stdout.close()
    assert not left_behind()
