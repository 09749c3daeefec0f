"""Colours: Okabe and Ito's, which readers who do not see all colours tell apart. One meaning each within a figure."""

from collections.abc import Mapping

from sambasim.costs.price import Bound
from sambasim.ir.graph import SectionKind
from sambasim.simulation.sync import SyncPath

BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, ORANGE, YELLOW, GREY, INK, HAIRLINE = "#56b4e9", "#e69f00", "#f0e442", "#9aa1a9", "#1b1f24", "#e3e7eb"

PARTS: Mapping[str, str] = {"compute": BLUE, "memory": ORANGE, "fill": SKY, "launch": GREY}
"""Of a section's seconds."""

BOUNDS: Mapping[Bound, str] = {
    Bound.COMPUTE: BLUE,
    Bound.MEMORY: ORANGE,
    Bound.CAPACITY: VERMILLION,
    Bound.LAUNCH: GREY,
}

KINDS: Mapping[str, str] = {
    "HOST": GREY,
    SectionKind.FWD: SKY,
    SectionKind.BCKWD: BLUE,
    SectionKind.GRADNORM: YELLOW,
    SectionKind.OPT: ORANGE,
    SectionKind.REDUCE: GREEN,
    SectionKind.GATHER: PURPLE,
}

PATHS: Mapping[SyncPath, str] = {SyncPath.RDU: GREEN, SyncPath.HOST: PURPLE}
