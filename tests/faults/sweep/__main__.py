"""The sweep as a command: it prints a line for each run, and at the end what was found."""

import json
import sys
import tempfile
from pathlib import Path

import click

from tests.faults.sweep.case import BUSY_S, Case, Verdict, cases, play
from tests.faults.sweep.inject import STEPS, Moment, command, compile_model, lay_out
from tests.support.mpi import mpirun, run_job


@click.command()
@click.option("--runs", default=150, help="How many runs.")
@click.option("--seed", default=1, help="Of the faults, ranks and moments.")
@click.option("--only", type=int, help="Just the run with this number.")
@click.option("--slack", default=1.0, help="How many seconds longer than promised a job may take to end.")
def main(runs: int, seed: int, only: int | None, slack: float) -> None:
    """Inject a random fault at a random moment into each of RUNS runs, and check what is left of them."""
    with tempfile.TemporaryDirectory(prefix="sambasim-sweep-") as place:
        verdicts = sweep([case for case in cases(runs, seed) if only in (None, case.number)], Path(place), slack)
    failed = [verdict for verdict in verdicts if verdict.problems]
    slowest = max((verdict.ended_s for verdict in verdicts if verdict.hit), default=0.0)
    print(f"{len(verdicts)} runs, {sum(verdict.hit for verdict in verdicts)} hit, slowest end {slowest:.1f} s later")
    for verdict in failed:
        print(f"\n{verdict.case}\n" + "\n".join(verdict.problems) + f"\n{verdict.stderr[-3000:]}")
    print(f"{len(verdicts) - len(failed)} as promised, {len(failed)} not")
    sys.exit(bool(failed))


def sweep(chosen: list[Case], place: Path, slack_s: float = BUSY_S) -> list[Verdict]:
    """Play each of `chosen` in a folder of its own."""
    pef, state_sha256, verdicts = compile_model(place / "model"), {0: ""}, []
    for case in chosen:
        ranks = 0 if case.moment is Moment.COMPILE else case.ranks
        if ranks not in state_sha256:
            state_sha256[ranks] = _undisturbed(ranks, place / f"undisturbed{ranks}", pef)
        folder = place / str(case.number)
        folder.mkdir()
        verdict = play(case, pef, state_sha256[ranks], folder, slack_s)
        verdicts.append(verdict)
        state = "; ".join(verdict.problems).splitlines()[0][:100] if verdict.problems else "as promised"
        hit = f"exit {verdict.exit_code:4}, {verdict.ended_s:4.1f} s" if verdict.hit else "ended before"
        print(f"{case}  {hit}, {verdict.checkpoints} checkpoints: {state}", flush=True)
    return verdicts


def _undisturbed(ranks: int, folder: Path, pef: bytes) -> str:
    folder.mkdir()
    lay_out(folder, pef)
    words = f"run --pef net --steps {STEPS} --threads 1 --no-evaluate --json"
    result = run_job([mpirun(), "-np", str(ranks), *command(words)], cwd=folder, timeout=120).check()
    digest: str = json.loads(result.stdout)["state_sha256"]
    return digest


if __name__ == "__main__":
    main()
