"""PEFs that this account did not compile are executed only with --trust; everything else works on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sambasim import pef
from sambasim.errors import InternalError, PefError
from sambasim.pef.files import record_compiled
from sambasim.runtime.run.setup import blamed_on_strangers
from sambasim.runtime.values.operators import check_operators
from tests.faults.command import sambasim
from tests.faults.fault import Compiled, net
from tests.pef.damage import Fields, put_together, unpack
from tests.support.mpi import Result


@pytest.fixture
def folder(tmp_path: Path, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the PEF `net`, on an account that has compiled nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fields, weights = unpack(compiled("net"))
    fields["data_source"]["source"] = str(tmp_path / "theirs.py:samples")
    (tmp_path / "net.pef").write_bytes(put_together(fields, weights))
    traces = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n\n\n"
    (tmp_path / "theirs.py").write_text(net(before=traces))
    return tmp_path


def change(folder: Path, edit: Callable[[Fields], object]) -> None:
    fields, weights = unpack((folder / "net.pef").read_bytes())
    edit(fields)
    (folder / "net.pef").write_bytes(put_together(fields, weights))


def run(folder: Path, flags: str = "") -> Result:
    return sambasim(f"run --pef net.pef {flags}", folder)


REFUSED = (
    "error[option]: this account did not compile net.pef: its graph and its data source are not executed\n"
    "  where: net.pef\n"
    "  try:   compile the model yourself: sambasim compile; or, if you trust the author of the file, add --trust\n"
)


def test_it_is_executed_only_once_it_is_trusted(folder: Path) -> None:
    for flags in ("--steps 1", "--inference", "--emulate-replicas 1", "--data synthetic"):
        refused = run(folder, flags)
        assert (refused.returncode, refused.stderr) == (2, REFUSED)
    # What executes nothing needs no trust.
    for command in ("inspect net.pef --all", "verify net.pef", "simulate net.pef", "compare net.pef net.pef"):
        sambasim(command, folder).check()
    assert not (folder / "ran").exists()
    for flags in ("--steps 1 --trust", "--inference --trust"):
        run(folder, flags).check()
    assert (folder / "ran").exists()


@pytest.mark.parametrize("arch", ["device.toml", "../sn30"])
def test_no_device_file_is_opened_because_a_pef_names_it(arch: str, folder: Path) -> None:
    change(folder, lambda f: f["compile_options"].update(arch=arch))
    trusted = "run --pef net.pef --data synthetic --trust"
    for command in (trusted, "simulate net.pef", "tilestat net.pef", "devices --pef net.pef"):
        outcome = sambasim(command, folder)
        assert outcome.returncode == 3, outcome.stderr
        assert f"the PEF was compiled for the device {arch!r}, which does not ship with sambasim" in outcome.stderr


WRONG: tuple[tuple[Callable[[Fields], object], str], ...] = (
    (lambda f: f["data_source"].update(workers=1 << 40), "data.workers = 1099511627776: must be at most 256"),
    (lambda f: f["graphs"]["net"]["program"]["evaluation"]["inputs"].append("A" * 100_000), "… "),
    (lambda f: f["compile_options"].update(num_tiles=9), "tiles of SN30, which has 8"),
)


def test_what_is_wrong_in_the_file_is_an_error_of_the_file(folder: Path) -> None:
    sound = (folder / "net.pef").read_bytes()
    for edit, text in WRONG:
        (folder / "net.pef").write_bytes(sound)
        change(folder, edit)
        outcome = run(folder, "--steps 1 --data synthetic --trust")
        assert outcome.returncode == 3, outcome.stderr
        assert text in outcome.stderr
        assert len(outcome.stderr) < 3000


def test_a_node_that_cannot_be_priced_is_an_error_of_the_file(folder: Path) -> None:
    def with_a_scalar_for_a_filter(fields: Fields) -> None:
        program = fields["graphs"]["net"]["program"]
        symbols = program["symbols"]
        tangent = {"name": next(name for name, symbol in symbols.items() if symbol["kind"] == "tangent")}
        program["training"]["nodes"][0].update(operator="aten.conv2d.default", args=[tangent, tangent])

    change(folder, with_a_scalar_for_a_filter)
    for command in ("tilestat net.pef", "simulate net.pef"):
        outcome = sambasim(command, folder)
        assert outcome.returncode == 3, outcome.stderr
        assert "argument 1 of aten.conv2d.default is not a tensor with a dimension 0" in outcome.stderr


def test_an_operator_that_does_not_fit_its_graph_is_not_executed(folder: Path) -> None:
    def with_another_shape(fields: Fields) -> None:
        program = fields["graphs"]["net"]["program"]
        node = program["training"]["nodes"][0]
        (weight,) = node["args"]
        node.update(operator="aten.view.default", args=[weight, [100_000]])

    change(folder, with_another_shape)
    refused = run(folder, "--steps 1 --trust")
    assert refused.returncode == 3, refused.stderr
    assert "error[pef]: node " in refused.stderr
    assert "aten.view.default does not take its arguments: RuntimeError: shape '[100000]' is invalid" in refused.stderr
    assert not (folder / "ran").exists()


def test_an_operator_that_fails_is_a_fault_of_the_file(folder: Path) -> None:
    document = pef.read(folder / "net.pef")
    with pytest.raises(PefError, match="it failed"), blamed_on_strangers(document):
        raise InternalError("it failed")
    record_compiled(document.digest)
    with pytest.raises(InternalError, match="it failed"), blamed_on_strangers(document):
        raise InternalError("it failed")


@pytest.mark.parametrize("name", ["cut", "stages", "shared", "asserting", "asserting_cut"])
def test_operators_of_sound_programs_fit_their_graphs(name: str, tmp_path: Path, compiled: Compiled) -> None:
    path = tmp_path / "sound.pef"
    path.write_bytes(compiled(name))
    check_operators(pef.read(path).program)


def test_a_table_shows_nothing_that_a_terminal_would_obey(folder: Path) -> None:
    change(folder, lambda f: f["graphs"]["net"]["metadata"].update(note="\x1b]0;x\x07\u202e"))
    change(folder, lambda f: f["graphs"]["net"]["program"]["training"]["sections"][0].update(name="\x1b[31mred"))
    for flags in ("--all", "--graph", "--section 0"):
        outcome = sambasim(f"inspect net.pef {flags}", folder).check()
        assert not any(character in outcome.stdout for character in "\x1b\x07\u202e")
