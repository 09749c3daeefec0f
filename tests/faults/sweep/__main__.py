"""The sweep as a command: a line for each run, and at the end what was found."""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from tests.faults.sweep.blows import Moment
from tests.faults.sweep.case import BUSY_S, Case, Verdict, cases, play
from tests.faults.sweep.subject import STEPS, Subject, command, compile_subject
from tests.support.mpi import mpirun, run_job


@click.command()
@click.option("--runs", default=150, help="How many runs are struck.")
@click.option("--seed", default=1, help="Of what is done to which.")
@click.option("--only", type=int, help="Just the run with this number.")
@click.option("--slack", default=1.0, help="Seconds that a job may take longer to end than it is promised.")
def main(runs: int, seed: int, only: int | None, slack: float) -> None:
    """Strike RUNS runs down, each at a random moment in a random way, and look at what is left of them."""
    with tempfile.TemporaryDirectory(prefix="sambasim-sweep-") as place:
        chosen = [case for case in cases(runs, seed) if only in (None, case.number)]
        verdicts = sweep(chosen, Path(place), slack, told=True)
    faulty = [verdict for verdict in verdicts if verdict.faults]
    struck = [verdict for verdict in verdicts if verdict.struck]
    slowest = max((verdict.ended_s for verdict in struck), default=0.0)
    by_moment = Counter(verdict.case.moment.value for verdict in struck)
    print(f"{len(verdicts)} runs, {len(struck)} struck ({dict(by_moment)}), slowest end {slowest:.1f} s after the blow")
    for verdict in faulty:
        print(f"\n{verdict.case}\n" + "\n".join(verdict.faults) + f"\n{verdict.stderr[-3000:]}")
    print(f"{len(verdicts) - len(faulty)} as promised, {len(faulty)} not")
    sys.exit(bool(faulty))


def sweep(chosen: list[Case], place: Path, slack_s: float = BUSY_S, *, told: bool = False) -> list[Verdict]:
    """Play each of `chosen` in a folder of its own."""
    (place / "subject").mkdir()
    pef = compile_subject(place / "subject")
    subject = Subject(pef, {})
    for ranks in sorted({case.ranks for case in chosen if case.moment is not Moment.COMPILE}):
        words = f"run --pef net --steps {STEPS} --threads 1 --no-evaluate --json"
        result = run_job([mpirun(), "-np", str(ranks), *command(words)], cwd=place / "subject", timeout=120).check()
        subject.state_sha256[ranks] = json.loads(result.stdout)["state_sha256"]
    verdicts = []
    for case in chosen:
        folder = place / str(case.number)
        folder.mkdir()
        verdicts.append(play(case, subject, folder, slack_s))
        if told:
            last = verdicts[-1]
            state = "; ".join(last.faults).splitlines()[0][:100] if last.faults else "as promised"
            struck = f"exit {last.exit_code:4}, {last.ended_s:4.1f} s" if last.struck else "ended before the blow"
            print(f"{case}  {struck}, {last.checkpoints} checkpoints: {state}", flush=True)
    return verdicts


if __name__ == "__main__":
    main()
