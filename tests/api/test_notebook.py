"""The cells of docs/notebook.ipynb, run as a notebook would."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def test_every_cell_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), names)
    tables = [text for text in shown if text.startswith("<pre")]
    assert len(tables) == 4
    assert "BCKWD" in tables[1]
    assert "measured on this machine" in tables[2]
    assert "predicted, not measured" in tables[3]
    accuracy = next(text for text in shown if text.startswith("tensor("))
    assert float(accuracy.removeprefix("tensor(").removesuffix(")")) > 0.8
