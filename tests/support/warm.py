"""A server of the tests that has imported torch and sambasim, which takes Python over a second a process, and copies
itself for each process of a job. `make test-whole` starts every process of its own, and so does what asks for it."""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import marshal
import os
import random
import re
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.warm_client import PASSED_ON

KEY = "SAMBASIM_TEST_WARM"
"""The path of the server's socket, in the environment of the tests."""

ROOT = Path(__file__).resolve().parents[2]
_CLIENT = str(Path(__file__).with_name("warm_client.py"))
_SCRIPT = str(Path(sys.executable).with_name("sambasim"))
_READ_AT_START = re.compile(
    "PYTHON|[KG]?OMP_|MKL_|KMP_|OPENBLAS_|NPY_|(PY)?TORCH_|(ONE)?DNN|ATEN_|LD_|MALLOC_|GLIBC_|LC_|LANG|TZ$"
)
"""Variables that Python, torch and libraries read as they are loaded: where one differs, there is no copy."""

JOB_KEY, NO_JOB = "SAMBASIM_TEST_JOB", "0" * 32
"""Every process of a job has this in its environment: 32 characters."""

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_HIGH = 500
"""Descriptors from here on are the server's."""


def command(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`argv`, in which Python is a copy of the server, if there is one that has the same variables."""
    if KEY not in os.environ or _read_at_start(environ) != json.loads(os.environ[f"{KEY}_FOR"]):
        return [*argv]
    if argv[0] not in (sys.executable, _SCRIPT) and Path(argv[0]).name != "mpirun":
        return [*argv]  # what it starts may be in another namespace
    at = next((index for index, word in enumerate(argv) if word in (sys.executable, _SCRIPT)), len(argv))
    words = [*argv[at + (argv[at : at + 1] == [sys.executable]) :]]
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        return [*argv]
    return [*argv[:at], sys.executable, "-I", "-S", _CLIENT, *words]


def on_path(folder: Path, environ: Mapping[str, str]) -> str:
    """The PATH of a shell in `environ`, on which `sambasim` is a copy of the server; `folder` is for its script."""
    if KEY not in environ:
        return environ["PATH"]
    script = folder / "sambasim"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {_CLIENT} -m sambasim "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{environ['PATH']}"


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if _READ_AT_START.match(key)}


def start(environ: Mapping[str, str]) -> Callable[[], None]:
    """Start the server, whose copies have `environ` but for what clients say. Returns what ends it."""
    folder = tempfile.TemporaryDirectory(prefix="sambasim-warm-")
    path = str(Path(folder.name, "socket"))
    with socket.socket(socket.AF_UNIX) as listening:  # before the server is ready: until then, clients wait
        listening.bind(path)
        listening.listen(64)
        argv, passed = [sys.executable, "-m", "tests.support.warm", str(listening.fileno())], [listening.fileno()]
        how: dict[str, Any] = {"cwd": ROOT, "env": {**environ}, "pass_fds": passed, "start_new_session": True}
        # Its stdin is closed with this process. Ctrl-C is for the tests: their end is the server's.
        server = subprocess.Popen(argv, stdin=subprocess.PIPE, **how)
    os.environ.update({KEY: path, f"{KEY}_FOR": json.dumps(_read_at_start(environ))})

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    return end


def serve(listening: socket.socket) -> Callable[[], object]:
    """Copies this process for each connection. Returns in the copies, with what they are to do."""
    import sambasim.cli.main
    import sambasim.runtime.job  # noqa: F401 -- for the copies, as most jobs train
    from sambasim.commands.compile import warm_up

    warm_up()
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    _KEPT.append(selector)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                os._exit(0)
            if key.fileobj is not listening:
                key.data()
                continue
            connection, _ = listening.accept()
            pid = os.fork()
            if not pid:
                return _become(connection)
            _Copy(pid, connection, selector)


_KEPT: list[object] = []
"""What must not be collected in a copy, where it would close descriptors of the same numbers."""


class _Copy:
    """A copy as the server sees it: its client hears of its end, and it ends with its client."""

    def __init__(self, pid: int, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._pid, self._connection, self._selector = pid, connection, selector
        (client, _, _) = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._ends = {os.pidfd_open(pid): self._ended}
        try:
            self._ends[os.pidfd_open(client)] = self._left
        except ProcessLookupError:  # it has left
            os.kill(pid, signal.SIGKILL)
        for end, react in self._ends.items():
            selector.register(end, selectors.EVENT_READ, react)
        self._tell(pid)

    def _left(self) -> None:
        if self._ends:  # else its end is among the same events
            os.kill(self._pid, signal.SIGKILL)
            self._forget(next(end for end, react in self._ends.items() if react == self._left))

    def _ended(self) -> None:
        for end in [*self._ends]:
            self._forget(end)
        self._tell(os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]))
        self._connection.close()

    def _forget(self, end: int) -> None:
        del self._ends[end]
        self._selector.unregister(end)
        os.close(end)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(f"{number}\n".encode())


def _become(connection: socket.socket) -> Callable[[], object]:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with the server
    head, files, _, _ = socket.recv_fds(connection, 8, 250)
    size = int.from_bytes(head)
    request = b""
    while len(request) < size:
        request += connection.recv(size - len(request)) or os._exit(1)  # the client has left
    argv, environ, folder, numbers, cores, limits = marshal.loads(request)
    held = [fcntl.fcntl(one, fcntl.F_DUPFD, _HIGH) for one in files]
    connection.detach()
    os.closerange(0, _HIGH)
    for one, number in zip(held, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    os.setsid()
    os.sched_setaffinity(0, cores)
    for one, limit in limits.items():
        resource.setrlimit(one, limit)
    if _read_at_start(environ) != _read_at_start(os.environ):  # mpirun has set them
        os.execve(sys.executable, [sys.executable, *argv], environ)
    _show(environ)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")
    random.seed()
    np.random.seed()
    tempfile.tempdir = None
    sys.orig_argv = [sys.executable, *argv]
    return _work(argv)


def _show(environ: Mapping[str, str]) -> None:
    """Write the job into the environment that this process began with, where `processes_of` looks for it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    ctypes.memmove(libc.getenv(JOB_KEY.encode()), environ[JOB_KEY].encode(), len(NO_JOB))


def _work(argv: list[str]) -> Callable[[], object]:
    """What `python ARGV` does."""
    kind, *rest = argv
    sys.argv = argv[argv[0] == "-m" :]
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).resolve().parent))
    if kind == "-m":
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if kind != "-c":
        return lambda: runpy.run_path(kind, run_name="__main__")
    sys.argv = ["-c", *rest[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return lambda: exec(rest[0], vars(main))


def _live(work: Callable[[], object]) -> None:
    """Work, and end as Python does, but do not take apart what the server has imported, which takes 0.3 s."""
    code: int | None = None
    try:
        work()
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        code = error.code
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    status = (code or 0) & 0xFF
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        os._exit(status)
    if mpi.Is_initialized() and not mpi.Is_finalized():
        ctypes.PyDLL(mpi.__file__).MPI_Finalize()  # while no thread of Python goes on, as at its end
    ctypes.PyDLL(None).exit(status)  # with what the MPI library does last


if __name__ == "__main__":
    for number in PASSED_ON:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _live(serve(socket.socket(fileno=int(sys.argv[1]))))
