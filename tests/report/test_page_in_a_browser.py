"""The page as a browser shows it, where one is installed."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from sambasim.report.page import measured_page, predicted_page
from sambasim.units import format_bytes, format_seconds
from tests.report.test_page import DIGEST, Page, a_run, hostile_program, predicted

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for found in map(shutil.which, NAMES) if found), None)
TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")


def shown(text: str, folder: Path) -> tuple[Page, str]:
    """The page after its scripts have run, and what they wrote to the console."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    flags = (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", f"user-data-dir={folder / 'profile'}",
        "virtual-time-budget=8000", "enable-logging=stderr", "v=0", "window-size=1280,2000", "dump-dom",
    )  # fmt: skip
    assert BROWSER is not None
    command = [BROWSER, *(f"--{flag}" for flag in flags), page.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own children only: the session is new
        process.wait()
    return Page(out), "\n".join(line for line in err.splitlines() if "CONSOLE" in line)


def drawn(page: Page) -> int:
    return sum("main-svg" in (attributes.get("class") or "") for name, attributes in page.elements if name == "svg")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_page_of_a_pef_and_its_run(tmp_path: Path) -> None:
    prediction = predicted()
    page, console = shown(predicted_page(prediction, DIGEST, (a_run(), "run.jsonl")), tmp_path)
    assert console == ""
    assert drawn(page) >= 9
    words = "\n".join(page.words)
    assert "_log_softmax_backward_data" in words
    assert "logreg.py:7" in words
    for section in prediction.alone.sections:
        assert format_seconds(section.price.predicted_s) in page.words
        assert format_bytes(section.load.traffic_bytes) in page.words
    rows = sum(name == "tr" for name, _ in page.elements)
    assert rows > len(prediction.graph.nodes) + len(prediction.alone.sections)


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_page_of_a_run(tmp_path: Path) -> None:
    page, console = shown(measured_page(a_run(), "run.jsonl"), tmp_path)
    assert console == ""
    assert drawn(page) >= 4


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_hostile_names_stay_text_in_the_browser(tmp_path: Path) -> None:
    page, console = shown(predicted_page(predicted(hostile_program()), DIGEST), tmp_path)
    assert console == ""
    assert drawn(page) >= 5
    names = {name for name, _ in page.elements}
    assert "img" not in names
    links = [attributes.get("href") or "" for name, attributes in page.elements if name == "a"]
    assert not [link for link in links if "example.org" in link]
