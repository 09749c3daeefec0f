"""How models lie on ranks: replicas, the chips that share a batch, stages and parts; and the PEF of each layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sambasim.options.compile import CompileOptions, compile_options
from tests.support.compiled import compile_from_options
from tests.support.examples import ANY_OPTIMIZER, EXAMPLES, MICRO_BATCH, MICRO_BATCHES, example_options

ADAMW = (
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
    "optimizer.weight_decay=0.1",
    "optimizer.max_grad_norm=0.5",
    "ema.decay=0.9",
    "ema.buffers=true",
    'optimizer.groups=[{match=["*bias"], weight_decay=0.0, lr=0.006}]',
)
UNCLIPPED = "optimizer.max_grad_norm="
REPLICATED = "parallel.data_parallel=true"
"""For a layout of one replica, which is compiled for one alone otherwise."""

_OWN = "tests/mpi/mesh_models.py"
_TEXT = ('data.source="examples/char_gpt.py:text"', "data.args.length=32")
_DIGITS = ("data.source=digits", "loss.name=cross_entropy")
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt": _TEXT,
    "bert": (f'data.source="{_OWN}:masked"',),
    "bert_of_many_words": (f'data.source="{_OWN}:masked"',),
    "Transposed": _DIGITS,
    "mlp": _DIGITS,
}
"""By name in `mesh_models`: what names its data and its loss. All other models are examples."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`dp` replicas of a model, each on `chips` that share its batch, of `pp` stages of `tp` parts. `others`: more
    options of compile."""

    model: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    chips: int = 1
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.model, *(f"{name}{size}" for name, size in self.sizes.items()), *self.others])

    @property
    def sizes(self) -> dict[str, int]:
        """Those above 1, by name."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "chips": self.chips}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis with several ranks."""
        sizes = {"dp": self.dp * self.chips, "pp": self.pp, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def ranks(self) -> int:
        return self.dp * self.chips * self.pp * self.tp

    @property
    def batch_size(self) -> int:
        return MICRO_BATCH * self.chips * (MICRO_BATCHES if self.pp > 1 else 1)

    @property
    def replicas(self) -> "Layout":
        """Replicas of one rank that train as this layout if they accumulate over its micro-batches."""
        others = tuple(one for one in self.others if one == REPLICATED or not one.startswith("parallel."))
        return Layout(self.model, self.dp * self.chips, others=others)

    def passes(self, accumulation: int) -> int:
        """How many passes `replicas` accumulate over."""
        return accumulation * (MICRO_BATCHES if self.pp > 1 else 1)

    def options(self, folder: Path) -> CompileOptions:
        cut = {"weight": self.tp, "batch": self.chips}
        chips = [(f"parallel.n_chips={n}", f"parallel.tensor_parallel={kind}") for kind, n in cut.items() if n > 1]
        overrides = [*ANY_OPTIMIZER, *ADAMW, *(option for one in chips for option in one)]
        if self.dp > 1:
            overrides += [REPLICATED, f"parallel.world_size={self.dp}"]
        if self.pp > 1:
            overrides += [f"parallel.pipeline_stages={self.pp}", f"parallel.micro_batches={MICRO_BATCHES}"]
        overrides += self.others
        if self.model in EXAMPLES:
            return example_options(self.model, folder, *overrides, data_parallel=False, batch_size=self.batch_size)
        flags = {"output_folder": folder, "batch_size": self.batch_size, "pef_name": self.model}
        return compile_options(None, f"{_OWN}:{self.model}", [*MODELS[self.model], *overrides], flags)

    def compiled(self, folder: Path) -> Path:
        """Its PEF, in a folder of its own within `folder`."""
        path = self.options(folder / str(self).replace("/", "_")).pef_path
        return path if path.exists() else compile_from_options(self.options(path.parent.parent)).path
