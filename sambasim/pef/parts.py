"""What a PEF is made of, by digests: of two PEFs, they tell which parts differ."""

from sambasim.pef.canonical import manifest_digest
from sambasim.pef.document import PefDocument
from sambasim.pef.encode import encode

PARTS = ("graph", "weights", "data_source", "compile_options", "training_defaults", "metadata")
"""All of a manifest but what wrote it. The smallest world size goes with the options, as it is one; the defaults of
optimizers' arguments go with those of training, as they are the same numbers."""


def part_digests(document: PefDocument) -> dict[str, str]:
    """By name of the part: the SHA-256, in hex, of its canonical JSON. `document` has been read or written, so that it
    knows the digest of its weights."""
    fields = encode(document, weights_size_bytes=0).model_dump(mode="json")
    graph = fields["program"]
    data_parallel = graph["data_parallel"] or {}
    of_optimizers = tuple(f"{optimizer['name']}__" for optimizer in graph["optimizers"])
    numbers = {
        argument["name"]: argument.pop("default")
        for argument in graph["runtime_arguments"]
        if argument["name"].startswith(of_optimizers)
    }
    parts = {
        "weights": fields["weights"],
        "data_source": fields["data_source"],
        "compile_options": [data_parallel.pop("world_size", None), fields["compile_options"]],
        "training_defaults": [numbers, fields["training_defaults"]],
        "metadata": fields["metadata"],
        "graph": graph,
    }
    return {name: manifest_digest({name: part}) for name, part in parts.items()}
