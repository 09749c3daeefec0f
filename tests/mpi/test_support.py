"""`run_mpi` fails a test whose job leaves a process or shared memory behind."""

import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.mpi import run_job
from tests.support.whole import whole


@whole
def test_shared_memory_left_behind_fails_the_test() -> None:
    name = f"sambasim-test-{uuid.uuid4().hex}"
    try:
        with pytest.raises(pytest.fail.Exception, match=f"left shared memory behind.*{name}"):
            run_job([sys.executable, "-c", f"open('/dev/shm/{name}', 'w').close()"])
    finally:
        Path("/dev/shm", name).unlink()


@whole
def test_a_process_left_behind_fails_the_test_and_is_ended() -> None:
    body = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3, start_new_session=True)\n"
        "print(child.pid)\n"
    )
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \[\d+\]") as failure:
        run_job([sys.executable, "-c", body])
    pid = int(str(failure.value).split("[")[1].rstrip("]"))
    until = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
