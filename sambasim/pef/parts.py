"""What a PEF is made of, by digests: of two PEFs, they tell which parts differ."""

from sambasim.pef.canonical import manifest_digest
from sambasim.pef.document import PefDocument
from sambasim.pef.encode import encode
from sambasim.pef.manifest import Sha256, StrictModel

_GRAPHS = ("training", "evaluation", "single")


class PartDigests(StrictModel):
    """The SHA-256 of the canonical JSON of each part; together, all of a manifest but what wrote it.

    The smallest world size goes with the options, as it is one; the defaults of optimizers' arguments go with those of
    training, as they are the same numbers. `source` are the lines of the model that operators come from.
    """

    graph: Sha256
    source: Sha256
    weights: Sha256
    data_source: Sha256
    compile_options: Sha256
    training_defaults: Sha256
    metadata: Sha256


def part_digests(document: PefDocument) -> PartDigests:
    """Those of `document`, which has been read or written, so that it knows the digest of its weights."""
    fields = encode(document, weights_size_bytes=0).model_dump(mode="json")
    program = fields["program"]
    data_parallel = program["data_parallel"] or {}
    of_optimizers = tuple(f"{optimizer['name']}__" for optimizer in program["optimizers"])
    numbers = {
        argument["name"]: argument.pop("default")
        for argument in program["runtime_arguments"]
        if argument["name"].startswith(of_optimizers)
    }
    parts = {
        "source": [graph.pop("sources") for name in _GRAPHS if (graph := program[name])],
        "weights": fields["weights"],
        "data_source": fields["data_source"],
        "compile_options": [data_parallel.pop("world_size", None), fields["compile_options"]],
        "training_defaults": [numbers, fields["training_defaults"]],
        "metadata": fields["metadata"],
        "graph": program,  # what is left of it
    }
    return PartDigests(**{name: manifest_digest({name: part}) for name, part in parts.items()})
