"""The fidelity page has the tables that its rows make."""

from pathlib import Path

import pytest

from sambasim import samba
from sambasim.samba.fidelity.page import updated

PAGE = Path(samba.__file__).with_name("README.md")


def test_the_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if request.config.getoption("--update-golden"):
        PAGE.write_text(updated(text), encoding="utf-8")
    else:
        assert updated(text) == text, "a row has changed: make golden"
