"""What `warm.py` starts in place of Python: asks the server for a copy that has torch already, with the files, folder
and environment of this process; passes signals on to it; and ends as it does. It imports as little as it can."""

import contextlib
import marshal
import os
import resource
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the copy is there
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    connection = socket.socket(socket.AF_UNIX)
    files = [number for number in files if number != connection.fileno() and _is_open(number)]
    connection.connect(os.environ["SAMBASIM_TEST_WARM"])
    limits = {one: resource.getrlimit(one) for one in LIMITS}
    given = sys.argv[1:], dict(os.environ), os.getcwd(), files, os.sched_getaffinity(0), limits
    request = marshal.dumps(given)
    socket.send_fds(connection, [len(request).to_bytes(8)], files)
    connection.sendall(request)
    answers = connection.makefile("rb")
    pid = int(answers.readline())
    for one in PASSED_ON:
        signal.signal(one, lambda number, _: _pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
