"""The commands of the README and of each page of docs/, run as typed, in one folder."""

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.mpi import job_environ, run_job
from tests.support.whole import whole_case
from tests.test_docs import _BLOCK, PAGES, README, ROOT, TEXTS, typed_lines

_ELSEWHERE = re.compile(r"git |cd |make |source |pytest |mpirun (--host|-x) |srun |sambasim validate|.*…")
"""What is not for one folder of this machine, or takes minutes."""

TIMEOUT_S = 300


def _scripts(text: str) -> list[str]:
    """The commands of each console or bash block."""
    kept = ([line for line in lines if not _ELSEWHERE.match(line)] for lines in typed_lines(text))
    return ["\n".join(lines) for lines in kept if lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages have before them: the model and the config of the tutorial, and the examples."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (config,) = (body for language, body in _BLOCK.findall(TEXTS[README]) if language == "toml")
    model = next(body for kind, body in _BLOCK.findall(TEXTS[ROOT / "docs" / "tutorial.md"]) if kind == "python")
    (folder / "net.toml").write_text(config, encoding="utf-8")
    (folder / "net.py").write_text(model, encoding="utf-8")
    return folder


_PATHS = [page for page in PAGES if _scripts(TEXTS[page])]


@pytest.mark.parametrize("page", [page if page.stem == "tutorial" else whole_case(page) for page in _PATHS])
def test_the_commands_of_a_page_work(page: Path, folder: Path, tmp_path: Path) -> None:
    environ = job_environ(uuid.uuid4().hex)
    env = {**environ, "PATH": warm.on_path(tmp_path, environ)}
    for script in _scripts(TEXTS[page]):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", ["python", "training"])
def test_the_example_in_python_works(page: str, tmp_path: Path) -> None:
    blocks = _BLOCK.findall(TEXTS[ROOT / "docs" / f"{page}.md"])
    (example,) = (body for language, body in blocks if language == "python")
    run_job([sys.executable, "-c", example], cwd=tmp_path).check()
