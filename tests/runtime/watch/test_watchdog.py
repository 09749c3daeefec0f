"""The watchdog's thread: it ends before MPI does, which it may be using."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sambasim.errors import PeerError
from sambasim.runtime.watch import board
from sambasim.runtime.watch.judgement import Seen
from sambasim.runtime.watch.watchdog import Watchdog

LETTER_S = 0.5


class SlowLetters:
    """Takes LETTER_S to look for letters."""

    def __init__(self) -> None:
        self.began, self.done = threading.Event(), threading.Event()

    def answer(self, seen: Sequence[Seen]) -> None:
        self.began.set()
        time.sleep(LETTER_S)
        self.done.set()

    def ask(self) -> Sequence[Seen]:
        return ()


def test_who_stops_it_can_wait_for_its_last_look(tmp_path: Path) -> None:
    made = board.create([tmp_path], "b.txt", 1)
    assert made is not None
    made.writer(0).begin(0, "here", os.getpid())
    ended: list[PeerError] = []
    letters = SlowLetters()
    dog = Watchdog(made, [None], 0, 60.0, letters, ended.append)
    dog.start()
    assert letters.began.wait(20)
    dog.stop()
    assert not letters.done.is_set()
    dog.rest(20)
    assert letters.done.is_set()
    assert ended == []
