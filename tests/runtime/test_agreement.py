"""What all ranks must have in common: differences are named with hosts and values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import pytest

from sambasim.errors import DataError, LaunchError, OptionError
from sambasim.runtime.checkpoint.folder import check_shared
from sambasim.runtime.machine import agreement
from sambasim.runtime.machine.agreement import DATA, check_answers, check_equal, check_job
from sambasim.runtime.machine.communicator import Communicator

T = TypeVar("T")


def answer(host: str, *of_ranks: dict[str, str]) -> str:
    return json.dumps([host, of_ranks])


@pytest.mark.parametrize(
    ("first", "other", "what", "remedy"),
    [
        ({"sambasim": "2 (code a)"}, {"sambasim": "2 (code b)"}, "sambasim: 2 (code a) for rank 0 on hA", "install"),
        ({"torch": "2.13.0+cpu"}, {"torch": "2.12.1"}, "torch: 2.13.0+cpu", "on hB: python -m pip install torch==2.13"),
        ({"Python": "3.12.1"}, {"Python": "3.11.9"}, "3.11.9 for rank 1 on hB", "the same Python"),
        ({"MPI": "MPICH 5.0.2"}, {"MPI": "MPICH 4.3.0"}, "MPI: MPICH 5.0.2", "one version of the MPI library"),
        ({"threads": "--threads 1"}, {"threads": "--threads 2"}, "--threads 1 for rank 0", "--threads N gives"),
        ({"PEF": "0a1b"}, {"PEF": "1b0a"}, "PEF: 0a1b for rank 0 on hA", "copy the same file to every host"),
        ({"--engine": "plain"}, {"--engine": "inductor"}, "--engine: plain", "start all ranks with the same flags"),
        ({DATA: "f.npz, content a"}, {DATA: "f.npz, content b"}, "data set: f.npz, content a", "the same whole"),
        # The first name decides: what comes after it may follow from it.
        ({"torch": "1", "PEF": "a"}, {"torch": "2", "PEF": "b"}, "torch:", "pip install"),
    ],
)  # fmt: skip
def test_a_difference_names_hosts_values_and_the_remedy(
    first: dict[str, str], other: dict[str, str], what: str, remedy: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        check_answers([answer("hA", first), answer("hB", other)])
    assert what in caught.value.what
    assert caught.value.what.endswith("for rank 1 on hB")
    assert remedy in (caught.value.remedy or "")


@pytest.mark.parametrize("old", ["0a" * 32, "1" * 64, "1e5", None, 7, ["hB", []], "[1, 2]", '{"a": 1}'])
def test_an_older_version_is_recognized_by_whatever_it_sends(old: object) -> None:
    for answers in (
        [answer("hA", {"sambasim": "2"}), cast(str, old)],
        [cast(str, old), answer("hA", {"sambasim": "2"})],
    ):
        with pytest.raises(LaunchError, match="an older version for rank"):
            check_answers(answers)


def test_ranks_that_agree_or_do_not_tell_are_no_difference() -> None:
    telling, silent = {"sambasim": "2", "torch": "1"}, {"torch": "1"}
    check_answers([answer("hA", telling, silent), answer("hB", telling), answer("hB", silent)])
    with pytest.raises(LaunchError, match="torch: 1 for rank 0 on hA, but 3 for rank 2 on hB"):
        check_answers([answer("hA", silent, silent), answer("hB", {"torch": "3"})])


@dataclass(frozen=True)
class OfTwoHosts(Communicator):
    """Rank 1, on a host of its own. Rank 0 says and sends what `first` makes of it."""

    said: object = None

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        return cast(T, value if self.said is None else self.said), value

    def broadcast_object(self, value: T | None) -> T:
        return cast(T, self.said)


def rank_1(said: object = None) -> OfTwoHosts:
    return OfTwoHosts(rank=1, node_of=(0, 1), host_name="hB", library="MPICH 5.0.2", said=said)


def test_the_versions_of_one_installation_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    check_job(rank_1(), None, {"--engine": "plain"})
    monkeypatch.setattr(agreement, "_code_sha256", lambda: "other code")
    seen: list[str] = []

    def gather(of: object, value: str) -> tuple[str, str]:
        seen.append(value)
        return value, value

    monkeypatch.setattr(OfTwoHosts, "all_gather_object", gather)
    check_job(rank_1(), 2)
    host, (facts,) = json.loads(seen[0])
    assert (host, facts["threads"], facts["MPI"]) == ("hB", "--threads 2", "MPICH 5.0.2")
    assert facts["sambasim"].endswith("(code other co)")


def test_the_error_has_the_kind_that_is_asked_for() -> None:
    for kind in (LaunchError, DataError):
        with pytest.raises(kind, match="PEF: a for rank 0 on hA, but b for rank 1 on hB"):
            check_equal(rank_1(answer("hA", {"PEF": "a"})), {"PEF": "b"}, kind=kind)
    alone = Communicator(rank=0, node_of=(0,), host_name="here")
    with pytest.raises(LaunchError, match="PEF: a for rank 0 on here, but b for rank 1 on here"):
        check_equal(alone, {"PEF": "a"}, {"PEF": "b"})


def test_a_folder_that_hosts_do_not_share_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sambasim.runtime.checkpoint.folder._SHOWN_AFTER_S", 0.1)
    (tmp_path / "mark").touch()
    shared = OfTwoHosts(rank=1, node_of=(0, 1), host_name="hB", said=("mark", "hA"))
    monkeypatch.setattr(OfTwoHosts, "all_gather_object", lambda self, value: (None, value))
    check_shared(tmp_path, "--checkpoint-dir", shared)
    (tmp_path / "mark").unlink()
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OptionError, match=f"--checkpoint-dir {folder} is another folder on hB than on hA"):
            check_shared(folder, "--checkpoint-dir", shared)
