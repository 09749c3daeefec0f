"""README.md and docs/: their length, links, commands, and the tests that they name."""

import ast
import pickle
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch

from sambasim.cli.main import sambasim
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import compile_options

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(sambasim [^`…]+)`")
_TEST = re.compile(r"\btests/[\w/]+(?:\.py)?(?:::\w+)?")
_ENDS = ("|", ">", ">>", "<", "&&", "||", "&", ";")


def typed_lines(text: str) -> Iterator[list[str]]:
    """What is typed in each console or bash block, a command or a part of one a line."""
    for language, body in _BLOCK.findall(text):
        lines = body.splitlines() if language in ("console", "bash") else []
        yield [line[2:] for line in lines if line.startswith("$ ")] or lines


def _commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a console or bash block, one list for each command of a line; and of those in a
    sentence or a table."""
    for lines in (*typed_lines(text.replace("\\\n", " ")), _INLINE.findall(text)):
        for line in lines:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = list(lexer)
            while words:
                end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
                yield words[:end]
                words = words[end + 1 :]


def _problem(words: list[str]) -> str | None:
    """Why `sambasim` would refuse to parse these words; None if it would not, or if they are no call of it."""
    if "sambasim" not in words:
        return None
    group: click.Command = sambasim
    arguments = words[words.index("sambasim") + 1 :]
    context = click.Context(group, info_name="sambasim", **group.context_settings)
    try:
        while isinstance(group, click.Group) and arguments and not arguments[0].startswith("-"):
            found = group.get_command(context, arguments[0])
            if found is None:
                return f"no command {arguments[0]}"
            settings = found.context_settings
            group, context = found, click.Context(found, context, arguments[0], **settings)
            arguments = arguments[1:]
        _, rest, _ = group.make_parser(context).parse_args(list(arguments))
    except click.UsageError as error:
        return error.format_message()
    return f"left over: {' '.join(rest)}" if rest and group.name != "app" else None


def test_the_readme_and_the_documents_are_short() -> None:
    words = {page.name: len(text.split()) for page, text in TEXTS.items()}
    assert words.pop("README.md") <= 1300
    assert words.pop("models.md") <= 400  # a list, which is written by a program
    assert words.pop("changelog.md") <= 400  # grows with each release
    assert sum(words.values()) <= 10_500, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith(("http:", "https:")):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for words in _commands(TEXTS[page]):
        assert _problem(words) is None, " ".join(words)


def test_the_config_of_the_readme_is_valid(tmp_path: Path) -> None:
    (config,) = (body for language, body in _BLOCK.findall(TEXTS[README]) if language == "toml")
    (tmp_path / "net.toml").write_text(config, encoding="utf-8")
    options = compile_options(tmp_path / "net.toml", None, [], {"data_parallel": True})
    assert options.training.batch_size == 32


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_tests_and_modules_that_are_named_exist(page: Path) -> None:
    targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {words[1] for words in _commands(TEXTS[page]) if words[:1] == ["make"] and len(words) > 1}
    named |= set(re.findall(r"`make ([a-z-]+)`", TEXTS[page]))
    assert named - {*targets} == set()
    for name in set(_TEST.findall(TEXTS[page])):
        path, _, function = name.partition("::")
        file = ROOT / path
        assert file.exists(), name
        assert not function or f"def {function}(" in file.read_text(encoding="utf-8"), name
    for name in set(re.findall(r"`((?:sambasim|[a-z]+)/[\w/]+(?:\.py|/))`", TEXTS[page])):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "sambasim")), name


def test_what_is_told_of_the_lines_of_old_apps_is_so(tmp_path: Path) -> None:
    table = TEXTS[ROOT / "docs" / "sambaflow.md"].partition("| line | why | remedy |")[2].partition("\n\n")[0]
    for words in ("`torch.load(…, weights_only=False)`", "`pip install setuptools`", "`transformers<4.32`"):
        assert words in table
    torch.save(torch.nn.ReLU(), tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "model.pt")
    assert isinstance(torch.load(tmp_path / "model.pt", weights_only=False), torch.nn.ReLU)
    assert ("distutils" in sys.stdlib_module_names) == (sys.version_info < (3, 12))


def test_each_promise_names_a_test_that_make_test_runs() -> None:
    table = TEXTS[ROOT / "docs" / "concepts.md"].partition("| promise | held by |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) >= 8
    for row in rows:
        files = [ROOT / name for name in _TEST.findall(row.rpartition(" | ")[2])]
        assert files, row
        assert all(_runs_by_default(file) for file in files), row


def _runs_by_default(file: Path) -> bool:
    """Whether a test of `file` is run without SAMBASIM_TEST=whole."""
    functions = [one for one in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(one, ast.FunctionDef)]
    tests = [one for one in functions if one.name.startswith("test_")]
    return any(not any(ast.unparse(mark) == "whole" for mark in one.decorator_list) for one in tests)


def test_the_reference_of_configs_names_every_optimizer() -> None:
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert [name for name in OPTIMIZERS if f"`{name}`" not in text] == []
