"""Runs work in a forked child of this process: what it changes ends with it, and so does a crash of PyTorch.

The child has one thread, since the other threads of OpenMP are not in it. What it prints, to `sys.stdout` or to the
descriptors below it, is printed by the parent. Ctrl-C ends both, and the child ends with its parent.
"""

import codecs
import faulthandler
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import IO, Any, TypeAlias, TypeVar

import torch

from sambasim.compiler.capture.recording import is_bug, line_of
from sambasim.data.user_code import summary, user_line
from sambasim.errors import CaptureError, InternalError, MachineError, SambasimError
from sambasim.forks import Idle, forked
from sambasim.runtime.machine.process import use_small_pages
from sambasim.whose_code import is_library_file

T = TypeVar("T")
OnPhase: TypeAlias = Callable[[str], None]
_Pipe: TypeAlias = "Connection[Any, Any]"

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.2  # how often the parent looks whether the child is alive, where something else holds its pipes open

_LONGEST_WAIT_S = 30.0  # a child that does nothing for so long waits for a thread of its parent, which is not in it

_FRAME = re.compile(rb'File "(?P<file>[^"]+)", line (?P<line>\d+) in ')  # of faulthandler, innermost first


def in_child(
    work: Callable[[OnPhase], T],
    on_phase: OnPhase = lambda phase: None,
    ends: Mapping[str, SambasimError] = MappingProxyType({}),
) -> T:
    """What `work` returns, in a child of this process; both results and errors must be such that pickle takes them.
    `on_phase` is called here with what `work` passes to its argument. A SambasimError of the child is raised here; any
    other exception, and the end of the child by a signal, as a CaptureError or InternalError with the user's line.
    `ends`: by phase, what is raised instead if the child ends in it."""
    with ExitStack() as stack:
        crash = stack.enter_context(tempfile.TemporaryFile())
        pipes = [Pipe(duplex=False) for _ in range(3)]  # messages, descriptor 1, descriptor 2
        for end in chain.from_iterable(pipes):
            stack.callback(end.close)
        child = _Child(forked(lambda: _live(work, pipes, crash)), [reads for reads, _ in pipes], on_phase, ends)
        stack.callback(child.end)
        for _, writes in pipes:
            writes.close()
        child.listen()
        result: T = child.result(crash)
        return result


class _Child:
    """The child as its parent sees it. `pipes`: the ends from which its messages and its output are read."""

    def __init__(self, pid: int, pipes: list[_Pipe], on_phase: OnPhase, ends: Mapping[str, SambasimError]) -> None:
        self._pid, self._pipes, self._on_phase, self._ends = pid, pipes, on_phase, ends
        self._phase = ""
        self._status: int | None = None
        self._answer: tuple[str, Any] | None = None
        self._idle, self._waits = Idle(pid), False
        new = codecs.getincrementaldecoder("utf-8")
        self._decoders = {1: new(errors="replace"), 2: new(errors="replace")}

    def listen(self) -> None:
        """Forward what the child prints and tells, until it has answered or ended."""
        unread = self._pipes
        while self._answer is None and (unread or self._lives()):
            ready = wait(unread, _POLL_S)
            unread = [pipe for pipe in unread if pipe not in ready or self._take(pipe)]
            if not ready and not self._lives():
                break
            self._waits = not ready and self._idle.seconds() > _LONGEST_WAIT_S
            if self._waits:
                os.kill(self._pid, signal.SIGABRT)  # by which faulthandler says where it is
                break
        if self._status is None:
            self._status = os.waitpid(self._pid, 0)[1]
        for pipe in self._pipes:  # what it wrote before it ended; another process may have them open
            while pipe.poll() and self._take(pipe):
                pass

    def end(self) -> None:
        """Nothing of the child is left."""
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self._status = os.waitpid(self._pid, 0)[1]

    def result(self, crash: IO[bytes]) -> Any:
        match self._answer:
            case "result", value:
                return value
            case "error", error:
                raise error
        raise self._ended(crash)

    def _lives(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is None

    def _take(self, pipe: _Pipe) -> bool:
        """Read and forward what is in `pipe`; False if it is at its end."""
        if number := self._pipes.index(pipe):
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
            self._print(number, data)
            return bool(data)
        while pipe.poll():  # what it tells is in order, and before what C code prints meanwhile
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):  # it has ended, perhaps within a message
                return False
            kind, value = pickle.loads(message)
            if kind == "phase":
                self._phase = value
                self._on_phase(value)
            elif kind == "printed":
                self._print(*value)
            else:
                self._answer = kind, value
        return True

    def _print(self, number: int, data: bytes) -> None:
        stream = sys.stdout if number == 1 else sys.stderr
        text = self._decoders[number].decode(data)
        if text and stream is not None:
            stream.write(text)
            stream.flush()

    def _ended(self, crash: IO[bytes]) -> BaseException:
        """The error of a child that ended without an answer, with the user's line in what faulthandler wrote."""
        where = None
        crash.seek(0)
        for frame in _FRAME.finditer(crash.read()):
            file, line = os.fsdecode(frame["file"]), int(frame["line"])
            if not is_library_file(file):
                where = line_of(file, line)
                break
        when = f" in the phase “{self._phase}”" if self._phase else ""
        code = os.waitstatus_to_exitcode(self._status or 0)
        if code == -signal.SIGINT:
            return KeyboardInterrupt()
        if self._phase in self._ends:
            return self._ends[self._phase]
        what, remedy = f"the model ended the process{when}, with exit code {code}", "leave out os._exit() in the model"
        if code == -signal.SIGKILL:
            what = f"the compiler was killed{when}: most likely this machine has too little memory"
            remedy = "a smaller batch, a smaller model, or more memory"
        elif self._waits:
            what = f"the model waits for another thread{when}: models are compiled in a forked process, which has one"
            remedy = "do in forward() itself what the thread does"
        elif code < 0:
            what = f"PyTorch crashed{when}: {signal.Signals(-code).name}"
            remedy = "write that line by other operators, or leave it out"
        return CaptureError(what, where=where, remedy=remedy)


def _live(work: Callable[[OnPhase], object], pipes: list[tuple[_Pipe, _Pipe]], crash: IO[bytes]) -> None:
    """The life of the child."""
    lock = threading.Lock()

    def tell(kind: str, value: object) -> None:
        data = pickle.dumps((kind, value))
        with lock:
            pipes[0][1].send_bytes(data)

    def tell_error(error: SambasimError, trace: str) -> None:
        if trace:
            error.add_note(f"in the child:\n{trace}")
        tell("error", error)

    try:
        torch.set_num_threads(1)
        use_small_pages()
        faulthandler.enable(crash, all_threads=False)
        for reads, _ in pipes:
            reads.close()
        for number, name in ((1, "stdout"), (2, "stderr")):
            writes = pipes[number][1]
            os.dup2(writes.fileno(), number)
            writes.close()
            output: Any = _Output(tell, number)  # as with `python -u`, without a buffer
            stream = io.TextIOWrapper(output, encoding="utf-8", errors="backslashreplace", write_through=True)
            setattr(sys, name, stream)
        tell("result", work(lambda phase: tell("phase", phase)))
    except BaseException as error:
        is_whole = isinstance(error, SambasimError) and not isinstance(error, InternalError) and not error.__cause__
        trace = "" if is_whole else "".join(traceback.format_exception(error))
        try:
            tell_error(error if isinstance(error, SambasimError) else _as_ours(error), trace)
        except Exception:  # pickle does not take it
            tell_error(InternalError(summary(error)), trace)


class _Output(io.RawIOBase):
    """What is written is a message, so that it keeps its place among the others."""

    def __init__(self, tell: Callable[[str, object], None], number: int) -> None:
        self._tell, self._number = tell, number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: Any) -> int:
        self._tell("printed", (self._number, bytes(data)))
        return len(data)


def _as_ours(error: BaseException) -> SambasimError:
    if isinstance(error, MemoryError):
        what = "this machine has too little memory to compile the model"
        return MachineError(what, remedy="a smaller batch or model")
    where = user_line(error)
    if where is None or is_bug(error):
        return InternalError(f"{summary(error)}: this is a bug in sambasim, please report it")
    return CaptureError(f"PyTorch raised {summary(error)}", where=where, remedy="write that line by other operators")
