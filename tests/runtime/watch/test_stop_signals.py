"""A second signal ends a process at once, wherever its main thread is."""

import os
import signal
import subprocess
import sys
import time

from sambasim.runtime.watch.supervisor import SAME_S, StopSignals

_BEGUN = "it waits"

_WAITING = f"""
import ctypes
from sambasim.runtime.watch.supervisor import StopSignals
with StopSignals(print):
    print("{_BEGUN}", flush=True)
    lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # for ever, and no signal interrupts it: so is a rank that waits in MPI
"""


def test_a_second_signal_ends_a_process_that_waits_in_c() -> None:
    with subprocess.Popen([sys.executable, "-c", _WAITING], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == _BEGUN
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # forwarded by mpirun, say
            time.sleep(SAME_S + 0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=5) == 128 + signal.SIGINT
        finally:
            process.kill()


def test_the_first_one_is_a_request_and_handlers_come_back() -> None:
    notified: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopSignals(notified.append) as signals:
        assert signals.request() == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.request() == signal.SIGUSR1
        signals.request()
    assert notified == ["SIGUSR1"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_reaches_a_forked_process_does_not_count_here() -> None:
    with StopSignals(print) as signals:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1) if signals.request() == 0 else None
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.1)
        assert signals.request() == 0


_SIGNAL_OF_ANOTHER = f"""
import os, signal
from sambasim.runtime.watch.supervisor import StopSignals
with StopSignals(print) as signals:
    signals.report(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
print("{_BEGUN}", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("it goes on")
"""


def test_a_rank_that_ends_with_another_does_not_die_of_its_own_signal_that_comes_later() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SIGNAL_OF_ANOTHER], stdout=subprocess.PIPE, text=True, check=False, timeout=20
    )
    assert ended.stdout.split("\n") == ["SIGTERM", _BEGUN, ""]
    assert ended.returncode == -signal.SIGTERM
