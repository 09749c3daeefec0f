"""The table of findings, which the README repeats, and what one of them is."""

from collections.abc import Mapping
from dataclasses import dataclass

from sambasim.errors import UserError


@dataclass(frozen=True, slots=True)
class Row:
    """`sentence` is the finding, `told` when it is told. A finding that is `refused` ends the run; any other is a
    notice, and a part of the summary at the end."""

    sentence: str
    told: str
    refused: bool = False


FINDINGS: Mapping[str, Row] = {
    "DP01": Row(
        "`--data-parallel` is not typed, or `session.run` is not given `data_parallel=`, at several replicas of a data "
        "parallel PEF: each trains without the others",
        "at the first step; ends the run if other replicas sync",
    ),
    "DP02": Row(
        "a flag was typed and is not passed on: `--reduce-on-rdu` to `session.run`; `--grad-accumulation-steps`, and "
        "another number of backwards makes an optimizer step; `--data-parallel`, `-ws`, `--o0`, `--o1` or "
        "`--inference` in the `config_dict` of `session.compile`",
        "at once",
    ),
    "DP03": Row(
        "replicas start from different weights: they go on with those of replica 0, where an RDU would keep its own",
        "at the first step",
    ),
    "DP04": Row(
        "replicas are fed the same samples: their samplers have one rank, or their batches are equal twice in steps 1, "
        "2 and 8; batches whose tensors have one value throughout, such as zeros to warm up with, do not count, and "
        "batches that come from no DataLoader, before a DistributedSampler feeds the first step, count from step 8",
        "at once",
    ),
    "DP05": Row(
        "samples are skipped, or seen by several replicas beyond the sampler's padding: the samplers of the replicas "
        "differ in seed, epoch, length or number of replicas; or, with `--check` and without such a sampler, replicas "
        "share samples",
        "at once",
    ),
    "DP06": Row(
        "a sampler shuffles each epoch in the same order, because its epoch is never set", "in the second epoch"
    ),
    "DP07": Row(
        "weights or hyperparameters differ between replicas",
        "in steps 1, 2, 8, 64, 512 … and at the end, with `--check` in every step",
    ),
    "DP08": Row(
        "several ranks write the same file; a line of the app that writes many is told once", "at the end at the latest"
    ),
    "DP09": Row(
        "replicas take different numbers of optimizer steps: one comes to its end, and another waits for it; or, where "
        "rates or orders differ, their epochs are of different length",
        "in steps 1, 2, 8, 64, 512 …, with `--check` in every step; ends the run where a replica would wait for ever",
        refused=True,
    ),
    "AP01": Row(
        "a batch has another size than the PEF takes: it is the end of the data set, or `-b` is another",
        "ends the run",
    ),
    "AP02": Row(
        "an argument of the library is another than when the PEF was compiled, as the app's `pef_metadata` tells",
        "when the PEF is loaded; where the graph differs too, that ends the run, and the arguments are named",
    ),
    "AP03": Row(
        "values that the device would convert at a loss: labels beyond int16, inputs of type float64",
        "with `--check` alone, because here they are exact",
    ),
    "AP04": Row(
        "arguments that a function of the library does not have: a near miss of a known keyword, too many positional "
        "ones, a hyperparameter that is no number. Other unknown keywords and hyperparameters are left out, with a "
        "notice",
        "ends the run",
    ),
    "AP05": Row(
        "what the device has is changed on the host alone: a hyperparameter of an optimizer, by a scheduler, say, that "
        "`session.run` is not told; the state of an optimizer; gradients, which are clipped where there are none; "
        "weights; `requires_grad`. The last two are looked at in calls 1, 2, 8, 64, 512 … of `session.run`, the others "
        "in every step",
        "at once",
    ),
    "AP06": Row(
        "`state_dict()` of the model is read, for a checkpoint, say, the model is given to `torch.save`, or it, or a "
        "module in it that the device trains, predicts on the host, or `trace_graph` loads the "
        "weights of the host, and the device has trained on since `to_cpu`",
        "at once; of what predicts in training mode, once no backward has followed",
    ),
    "AP07": Row(
        "nothing is trained: the device runs backwards and no optimizer step, `to_cpu` replaces what the app has "
        "trained on the host, or a PEF that predicts is given hyperparameters",
        "at once",
    ),
    "AP08": Row("the loss, or what stands in its place, is NaN or infinite", "at the first such step"),
    "AP09": Row(
        "the model returns no loss, and no `sn_grad` is set: the backward starts from the mean of its output. Where "
        "several outputs might be the loss, that ends the run",
        "at the first backward",
    ),
}
"""By code. Codes stay the same between releases."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found: what it is, where in the app, as `file:line: code`, and what to type there."""

    code: str
    what: str
    where: str | None
    remedy: str

    @property
    def words(self) -> str:
        """Code and finding, in a line."""
        return f"{self.code}: {self.what}"


class KeywordError(UserError, TypeError):
    """A function of the library was called with a keyword that it does not have."""

    code = "keyword"
