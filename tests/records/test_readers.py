"""Reading back what a run wrote: metrics and digests, where errors name the file and the line; and a trace's tracks."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sambasim.errors import ArtifactError, OptionError
from sambasim.files import TwiceError, once
from sambasim.records.digests import RUN_FILE, StepDigests, ValueDigest, is_recording, read_recording, replica_file
from sambasim.records.metrics import Line, json_line, read_run
from sambasim.records.trace import TraceProcess, TraceSpan, Track, trace_json
from tests.report.test_page import a_run as a_run_with_metrics
from tests.support.recordings import a_run, a_step, write_recording


def write_metrics(folder: Path, text: str) -> Path:
    path = folder / "run.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def metrics_lines() -> list[str]:
    run = a_run_with_metrics()
    assert run.summary is not None
    records: list[Line] = [*run.steps, *run.evaluations, run.summary]
    return [json_line(record) for record in records]


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    text = "".join(metrics_lines())
    assert read_run(write_metrics(tmp_path, text)) == a_run_with_metrics()
    stopped = read_run(write_metrics(tmp_path, text[:-20]))
    assert (stopped.summary, stopped.steps) == (None, a_run_with_metrics().steps)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    record = replace(a_run_with_metrics().steps[0], loss=math.nan, grad_norm=math.inf)
    (step,) = read_run(write_metrics(tmp_path, json_line(record))).steps
    assert math.isnan(step.loss)
    assert step.grad_norm is None


IMPOSSIBLE = [
    re.sub(r'"peer":\d+', f'"peer":{number}', metrics_lines()[-1]) for number in (-1, "9" * 400, "9" * 5000, "NaN")
]


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"kind": "song"}', '{"kind": "step", "step": 1}', '{"kind": []}', *IMPOSSIBLE]
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = write_metrics(tmp_path, metrics_lines()[0] + line + "\n")
    with pytest.raises(ArtifactError, match="a line is not what sambasim run --metrics writes") as caught:
        read_run(path)
    assert caught.value.where == f"{path}:2"


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, metrics_lines()[0].replace('"step":1', '"step":1,"step":1'))
    with pytest.raises(ArtifactError, match="step is given twice in one table"):
        read_run(path)
    for name, key in ((RUN_FILE, '"seed":0'), (replica_file(0), '"loss":0.5')):
        recording = read_recording(write_recording(tmp_path / name, {0: [a_step(1)]}))
        file = recording.folder / name
        file.write_text(file.read_text(encoding="utf-8").replace(key, f"{key},{key}"), encoding="utf-8")
        with pytest.raises(ArtifactError, match="is given twice in one table"):
            list(read_recording(recording.folder).steps(0))


def test_a_key_that_is_there_twice_is_found_soon_among_many() -> None:
    many = [(str(number), 0) for number in range(200_000)]
    with pytest.raises(TwiceError, match="199999 is given twice"):
        once([*many, many[-1]])


def test_metrics_that_are_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_run(tmp_path / "run.jsonl")
    with pytest.raises(ArtifactError, match="has no records"):
        read_run(write_metrics(tmp_path, ""))


NAN = ValueDigest("gradient", "net__w__grad", 0, 1, "ab" * 8, None, 3)


def test_a_recording_comes_back_up_to_its_last_whole_line_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    steps = [a_step(1, loss=None), a_step(2, more=[NAN])]
    recording = read_recording(write_recording(tmp_path / "a", {0: steps, 11: steps}))
    assert recording.run == a_run(ranks=12, last_step=2)
    assert recording.replicas == (0, 11)
    begins = StepDigests(step=0, begins=True, values=())
    assert list(recording.steps(11)) == [begins, *steps]
    file = recording.folder / replica_file(0)
    text = file.read_text(encoding="utf-8")
    file.write_text(text[:-10], encoding="utf-8")
    assert list(recording.steps(0)) == [begins, steps[0]]
    file.write_text(text.replace('"step":2', '"stop":2'), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is not what sambasim run --record-digests writes: step: Field") as error:
        list(recording.steps(0))
    assert error.value.where == f"{file}:3"


def test_a_folder_of_something_else_is_no_recording(tmp_path: Path) -> None:
    assert not is_recording(tmp_path)
    with pytest.raises(OptionError, match=r"run.json cannot be read: No such file"):
        read_recording(tmp_path)
    (tmp_path / RUN_FILE).write_text('{"kind": "other"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"run.json is not what sambasim run --record-digests writes: kind"):
        read_recording(tmp_path)


def test_every_track_that_is_used_has_a_thread_of_its_own() -> None:
    spans = [TraceSpan(track, "busy", 5, 9) for track in (Track.COLLECTIVES, Track.HOST)]
    processes = [TraceProcess(rank, f"replica {rank}, measured", spans) for rank in range(2)]
    events = json.loads(trace_json(processes, {"kind": "measured"}))["traceEvents"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {(0, 1): "host", (0, 4): "collectives", (1, 1): "host", (1, 4): "collectives"}
    assert [event["tid"] for event in events if event["ph"] == "X"] == [1, 4, 1, 4]
