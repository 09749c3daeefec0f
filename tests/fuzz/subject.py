"""What is fuzzed: sound files of one kind, how they are changed, and the ways in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

MIB = 1 << 20

Mutation: TypeAlias = Callable[[Random, Sequence[bytes]], bytes]
"""Makes a mutant of the sound files, by what the generator draws."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way in. `enter` returns, or raises SambasimError; whatever else it raises is a finding.

    It may take `seconds`, and memory of twice the file and `constant_bytes` more. With `if_sound`, it is tried only if
    all ways before it have returned.
    """

    name: str
    enter: Callable[[Path], None]
    seconds: float = 10
    constant_bytes: int = 96 * MIB
    if_sound: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of file. `make_samples` writes sound ones into a folder; `mutations` come on top of the generic ones."""

    name: str
    suffix: str
    make_samples: Callable[[Path], Sequence[Path]]
    mutations: Sequence[Mutation]
    ways: Sequence[Way]

    def mutant(self, seed: int, number: int, samples: Sequence[bytes]) -> tuple[str, bytes]:
        """Mutant `number` of `seed`, and the name of the mutation that made it."""
        from tests.fuzz.raw import RAW

        random = Random(f"{self.name} {seed} {number}")
        # Most damage at random is found by the first checks: what was made with care gets most of the turns.
        mutation = random.choice(RAW if random.random() < 0.15 else self.mutations)
        return mutation.__name__, mutation(random, samples)
