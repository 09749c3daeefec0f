"""Every flag of a SambaFlow app, as data: one row a flag, with its commands, its default and what it does here.

`parser.py` makes parsers from the rows; nothing else says what a flag is. A flag that the vendor's stack knows and that
can mean nothing without the hardware is `inert`: it is taken, and a notice says that it changes nothing and why.
"""

from sambasim.samba.utils.flag import (
    COMPILE,
    EVERYWHERE,
    MEASURE_PERFORMANCE,
    MEASURING,
    WITH_PEF,
    Flag,
    at_least_one,
    log_level,
    seconds,
    switch,
    time_and_process,
)

_ONLY_COMPILE = (COMPILE,)
_NO_CHIP_LAYOUT = "one replica is one device here, and is not laid out over chips"
_OWN_HEURISTICS = "sections are cut and placed by sambasim's own rules, which take no such advice"


_COMMON = (
    Flag(("--batch-size", "-b"), EVERYWHERE, "Samples of one replica in one batch.", 1, at_least_one, placeholder="N"),
    Flag(
        ("--microbatch-size",),
        EVERYWHERE,
        "Samples that go through the device together.",
        None,
        at_least_one,
        placeholder="N",
        inert="the whole batch goes through at once",
    ),
    Flag(
        ("--grad-accumulation-steps",),
        EVERYWHERE,
        "Batches whose gradients make one optimizer step.",
        1,
        at_least_one,
        placeholder="N",
    ),
    switch(("--inference",), EVERYWHERE, "Forward only: no loss, no optimizer. For compile and for run."),
    switch(
        ("--data-parallel",),
        EVERYWHERE,
        "Compile: add the sections that sync replicas. Otherwise: let the ranks of mpirun be replicas.",
    ),
    Flag(
        ("--data-parallel-mode",),
        EVERYWHERE,
        "How replicas are laid out.",
        "normal",
        placeholder="MODE",
        inert="replicas are laid out in one way, normal",
    ),
    Flag(
        ("--mapping",),
        EVERYWHERE,
        "How the graph is mapped onto the device.",
        "section",
        choices=("section", "spatial"),
        inert="sections run one after the other, which is the mapping section",
    ),
    Flag(
        ("--dtype",),
        EVERYWHERE,
        "What numbers are stored in: fp32 unless compile says bf16; elsewhere it may be left out.",
        choices=("fp32", "bf16"),
    ),
    Flag(
        ("--log-level",),
        EVERYWHERE,
        "How much samba_logger tells: debug, info, warning …",
        None,
        log_level,
        placeholder="LEVEL",
    ),
    switch(("--verbose",), EVERYWHERE, "Tell more.", "there is nothing more to tell"),
    switch(("--debug",), EVERYWHERE, "Keep what helps to debug the compiler.", "the vendor's compiler is not here"),
    Flag(
        ("--distlearn-config",),
        EVERYWHERE,
        "A file that lays out replicas over nodes.",
        placeholder="FILE",
        inert="mpirun lays out replicas over nodes",
    ),
    Flag(
        ("--gold-file-path",),
        EVERYWHERE,
        "A file of expected results: TestWithGold writes it, and compares with it from then on.",
        placeholder="FILE",
    ),
    switch(("--visualize",), EVERYWHERE, "Draw the graph.", "sambasim inspect shows the graph of a PEF"),
    switch(("--enable-profiler",), EVERYWHERE, "Let the device profile itself.", "there is no device to do it"),
)


_COMPILE = (
    Flag(
        ("--pef-name",), _ONLY_COMPILE, "The PEF is OUTPUT_FOLDER/NAME/NAME.pef.", time_and_process, placeholder="NAME"
    ),
    Flag(("--output-folder",), _ONLY_COMPILE, "Where PEFs go.", "out", placeholder="FOLDER"),
    Flag(
        ("--world-size", "-ws", "--ws"),
        (COMPILE, MEASURE_PERFORMANCE),
        "The least number of replicas.",
        1,
        at_least_one,
        placeholder="N",
    ),
    switch(("--o0",), _ONLY_COMPILE, "One operator in a section."),
    switch(("--o1",), _ONLY_COMPILE, "Operators fused by rules."),
    switch(("--o3",), _ONLY_COMPILE, "Sections as large as the device allows; so it is without a flag, too."),
    Flag(
        ("--arch",), _ONLY_COMPILE, "The device that is compiled for.", "sn30", choices=("sn10", "sn20", "sn30", "sn40")
    ),
    switch(
        ("--enable-stoc-rounding",),
        _ONLY_COMPILE,
        "With --dtype bf16: optimizer steps round at random, in the mean without error.",
    ),
    Flag(
        ("--num-spatial-batches",),
        _ONLY_COMPILE,
        "Batches side by side.",
        1,
        at_least_one,
        placeholder="N",
        inert=_NO_CHIP_LAYOUT,
    ),
    Flag(
        ("--n-chips",), _ONLY_COMPILE, "Chips of one replica.", 1, at_least_one, placeholder="N", inert=_NO_CHIP_LAYOUT
    ),
    Flag(
        ("--num-tiles",),
        _ONLY_COMPILE,
        "Tiles of the device that one replica has; -1 is all of them.",
        -1,
        int,
        placeholder="N",
    ),
    Flag(
        ("--tensor-parallel",),
        _ONLY_COMPILE,
        "What is split over the chips of a replica.",
        "none",
        choices=("none", "batch", "weight"),
        inert=_NO_CHIP_LAYOUT,
    ),
    Flag(
        ("--optim-level",),
        _ONLY_COMPILE,
        "How hard the vendor's compiler tries.",
        placeholder="LEVEL",
        inert=_OWN_HEURISTICS,
    ),
    Flag(
        ("--compiler-configs-file",),
        _ONLY_COMPILE,
        "Advice for the vendor's compiler.",
        placeholder="FILE",
        inert=_OWN_HEURISTICS,
    ),
    Flag(("--mac-human-decision",), _ONLY_COMPILE, "A person's placement.", placeholder="FILE", inert=_OWN_HEURISTICS),
    Flag(
        ("--resources-scaling-factors",),
        _ONLY_COMPILE,
        "Factors on estimates of resources.",
        None,
        float,
        "+",
        placeholder="FACTOR",
        inert=_OWN_HEURISTICS,
    ),
)


_WITH_PEF = (
    Flag(
        ("--pef", "-p"),
        WITH_PEF,
        "The PEF: a path, or a name, found as out/NAME/NAME.pef.",
        required=True,
        placeholder="FILE",
    ),
    switch(("--reduce-on-rdu",), WITH_PEF, "Sync gradients between devices, not through the host."),
    Flag(
        ("--threads",),
        WITH_PEF,
        "Threads of each rank; by default its share of the cores.",
        None,
        at_least_one,
        placeholder="N",
    ),
)


_MEASURING = (
    Flag(("--num-iterations",), MEASURING, "Steps that are measured.", 100, at_least_one, placeholder="N"),
    Flag(("--min-duration",), MEASURING, "Seconds that are measured at least.", 0.0, seconds, placeholder="SECONDS"),
    switch(("--run-graph-only",), MEASURING, "Measure the sections alone, without what places inputs and outputs."),
    Flag(
        ("--json",),
        MEASURING,
        "Write the results as JSON to FILE, or print it.",
        None,
        count="?",
        bare="-",
        placeholder="FILE",
    ),
    Flag(("--bench-report-json",), MEASURING, "Write what was measured as JSON to this file.", placeholder="FILE"),
    Flag(
        ("--compiled-stats-json",),
        MEASURING,
        "Write what is known of the PEF as JSON to this file.",
        placeholder="FILE",
    ),
)


FLAGS: tuple[Flag, ...] = (*_COMMON, *_COMPILE, *_WITH_PEF, *_MEASURING)
"""All flags, in the order in which help lists them."""
