"""The command line that runs what an app's command line has compiled."""

import shlex
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sambasim.samba.utils.flag import RUN
from sambasim.samba.utils.parser import AddArguments, command_parser, parse, respelled

_DATA_PARALLEL = "--data-parallel"


@dataclass(frozen=True, slots=True)
class NextRun:
    """What was typed to compile: what starts the app, `["python", "app.py"]`, the `words` behind `compile` with the
    `parser` that they are for, and the flags that the app adds to a run."""

    start: Sequence[str]
    words: Sequence[str]
    parser: ArgumentParser
    additions: Sequence[AddArguments]

    def command(self, pef: str, replicas: int) -> str | None:
        """What runs `pef` with the flags of the compile that a run has too; None where a run wants more than that."""
        try:
            run = command_parser(RUN, self.additions)
            kept = [word for group in self._groups() if _takes(run, group) for word in group]
            if replicas > 1 and _DATA_PARALLEL not in kept:
                kept.append(_DATA_PARALLEL)
            words = [*kept, "--pef", pef, *(["--reduce-on-rdu"] if replicas > 1 else [])]
            parse(run, RUN, words)
        except Exception:  # a function of the app, made for a run, may fail in any way where no run begins
            return None
        launcher = ["mpirun", "-np", str(replicas)] if replicas > 1 else []
        return shlex.join([*launcher, *self.start, RUN, *words])

    def _groups(self) -> Iterator[list[str]]:
        """Each flag with its values; a word that belongs to no flag is alone."""
        words = respelled(self.parser, self.words)
        while words:
            action = self._action(words[0])
            count = 1 + (0 if action is None or "=" in words[0] else self._values(action, words[1:]))
            yield words[:count]
            del words[:count]

    def _action(self, word: str) -> Action | None:
        return self.parser._option_string_actions.get(word.partition("=")[0])

    def _values(self, action: Action, behind: Sequence[str]) -> int:
        if action.nargs is None or isinstance(action.nargs, int):
            return 1 if action.nargs is None else action.nargs
        following = next((index for index, word in enumerate(behind) if self._action(word)), len(behind))
        return min(following, 1) if action.nargs == "?" else following


def _takes(run: ArgumentParser, group: Sequence[str]) -> bool:
    action = run._option_string_actions.get(group[0].partition("=")[0])
    return not group[0].startswith("-") if action is None else action.help != SUPPRESS and action.dest != "pef"
