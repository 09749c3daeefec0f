"""Whose code a file is: its folder decides, and not a part of a folder's name."""

import sysconfig
from pathlib import Path

import pytest
import torch

import sambasim
from sambasim.whose_code import is_library_file, is_ours, is_package_file, is_users_file

_PACKAGE = Path(sambasim.__file__).parent


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/home/me/my-packages/net.py", True),
        ("/home/me/net.py", True),
        (str(_PACKAGE / "quickstart" / "digits.py"), True),
        ("/venv/lib/python3.11/site-packages/transformers/models.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        (torch.__file__, False),
        (f"{sysconfig.get_path('stdlib')}/random.py", False),
        (str(_PACKAGE / "cli" / "run.py"), False),
        ("<string>", False),
    ],
)
def test_a_file_is_a_users_if_it_is_not_installed(file: str, is_users: bool) -> None:
    assert is_users_file(file) is is_users


def test_what_a_capture_follows_is_no_library() -> None:
    transformers = "/venv/lib/python3.11/site-packages/transformers/models.py"
    assert is_package_file(transformers)
    assert not is_library_file(transformers)
    assert is_ours(str(_PACKAGE / "cli" / "run.py"))
