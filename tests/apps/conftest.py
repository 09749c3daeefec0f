"""One thread, because bits are compared at one count; and the example of a class of tests, compiled."""

import re

import pytest

from tests.apps.support import DATA_PARALLEL, App


@pytest.fixture(autouse=True)
def same_threads(one_thread: None) -> None:
    """Bits are compared at one count."""


@pytest.fixture(scope="class")
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> App:
    """The `example` of a class that derives from ExampleTests, compiled for two replicas and more."""
    app = App(request.cls.example, tmp_path_factory.mktemp("app"))
    name = app.example.name
    result = app.compile()
    assert re.fullmatch(
        rf"{name}: .* REDUCE.*\nchecked: .* steps equal to eager PyTorch, bit for bit \(1 thread, .*\n"
        rf"PEF file {app.folder}/out/{name}/{name}.pef created\nCompilation succeeded\n"
        rf"next: mpirun -np 2 .* run .*--pef out/{name}/{name}.pef .*--data-parallel --reduce-on-rdu.*\n",
        result.stdout,
    ), result.stdout
    assert [line for line in result.stderr.splitlines() if not line.endswith(" …")] == []
    return app


@pytest.fixture(scope="class")
def in_bf16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> App:
    """The `example` of such a class, compiled with --dtype bf16."""
    app = App(request.cls.example, tmp_path_factory.mktemp("in_bf16"))
    assert " steps equal to eager PyTorch" in app.compile(*DATA_PARALLEL, "--dtype", "bf16").stdout
    return app
