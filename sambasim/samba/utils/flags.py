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
    number,
    pef_name,
    seconds,
    switch,
    time_and_process,
)

_ONLY_COMPILE = (COMPILE,)
_NO_CHIP_LAYOUT = "one replica is one device here, and is not laid out over chips"
_OWN_HEURISTICS = "sections are cut and placed by sambasim's own rules, which take no such advice"
_NO_TILING = "device memory holds each tensor whole"


_COMMON = (
    Flag(("--batch-size", "-b"), EVERYWHERE, "Samples of one replica in one batch.", 1, at_least_one, placeholder="N"),
    Flag(
        ("--microbatch-size", "-mb"),
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
    switch(("--verbose", "-v"), EVERYWHERE, "Tell more.", "there is nothing more to tell"),
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
        ("--pef-name",),
        _ONLY_COMPILE,
        "The PEF is OUTPUT_FOLDER/NAME/NAME.pef.",
        time_and_process,
        pef_name,
        placeholder="NAME",
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
        ("--enable-stoc-rounding", "--enable-stochastic-rounding"),
        _ONLY_COMPILE,
        "With --dtype bf16: optimizer steps round at random, in the mean without error.",
    ),
    Flag(
        ("--gradient-groups",),
        _ONLY_COMPILE,
        "What one gradient group holds: the gradients of a backward section, or of one parameter.",
        "section",
        choices=("section", "parameter"),
    ),
    Flag(
        ("--num-spatial-batches",),
        EVERYWHERE,
        "Batches side by side.",
        1,
        at_least_one,
        placeholder="N",
        inert=_NO_CHIP_LAYOUT,
    ),
    Flag(("--n-chips",), EVERYWHERE, "Chips of one replica.", 1, at_least_one, placeholder="N", inert=_NO_CHIP_LAYOUT),
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
        EVERYWHERE,
        "What is split over the chips of a replica.",
        "none",
        choices=("none", "batch", "weight"),
        inert=_NO_CHIP_LAYOUT,
    ),
    Flag(
        ("--optim-level",),
        EVERYWHERE,
        "How hard the vendor's compiler tries.",
        placeholder="LEVEL",
        inert=_OWN_HEURISTICS,
    ),
    Flag(
        ("--compiler-configs-file",),
        EVERYWHERE,
        "Advice for the vendor's compiler.",
        placeholder="FILE",
        inert=_OWN_HEURISTICS,
    ),
    Flag(("--mac-human-decision",), EVERYWHERE, "A person's placement.", placeholder="FILE", inert=_OWN_HEURISTICS),
    Flag(
        ("--resources-scaling-factors",),
        EVERYWHERE,
        "Factors on estimates of resources.",
        None,
        float,
        "+",
        placeholder="FACTOR",
        inert=_OWN_HEURISTICS,
    ),
    switch(("--mac-v1",), EVERYWHERE, "The vendor's older placement.", _OWN_HEURISTICS),
    switch(("--mac-v2",), EVERYWHERE, "The vendor's newer placement.", _OWN_HEURISTICS),
    switch(("--weight-sharing",), EVERYWHERE, "Batches side by side share weights.", _NO_CHIP_LAYOUT),
    switch(("--enable-conv-tiling",), EVERYWHERE, "Split images of convolutions into tiles.", _NO_TILING),
    switch(("--enable-tiling",), EVERYWHERE, "Split tensors into tiles.", _NO_TILING),
    switch(
        ("--disable-retry-lower-visible-resources",),
        EVERYWHERE,
        "Fail where a section does not fit, instead of trying with fewer units.",
        _OWN_HEURISTICS,
    ),
    Flag(
        ("--io-memory-location",),
        EVERYWHERE,
        "Which memory holds inputs and outputs.",
        placeholder="MEMORY",
        inert="inputs and outputs are copied between host and device memory in each run",
    ),
    Flag(
        ("--resource-report-path",),
        EVERYWHERE,
        "The vendor's report of resources.",
        placeholder="FILE",
        inert="sambasim report --tables shows the units of each section",
    ),
    switch(("--verbose-report",), EVERYWHERE, "A longer report of resources.", "sambasim inspect shows all there is"),
)


_WITH_PEF = (
    Flag(
        ("--pef", "-p"),
        EVERYWHERE,
        "The PEF: a path, or a name, found as out/NAME/NAME.pef.",
        required=WITH_PEF,
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
    switch(
        ("--use-sambaloader",),
        EVERYWHERE,
        "Load data by the vendor's loader.",
        "data comes from the DataLoader or SambaLoader that the app makes",
    ),
    Flag(
        ("--num-iterations", "-n"),
        WITH_PEF,
        "Steps that are measured; on run and test for the app to read.",
        100,
        at_least_one,
        placeholder="N",
    ),
    Flag(
        ("--acc-report-json",),
        WITH_PEF,
        "The file of the AccuracyReport that the app saves.",
        placeholder="FILE",
    ),
    Flag(
        ("--min-throughput",),
        WITH_PEF,
        "measure-performance fails below this many samples/s; on run and test for the app to read.",
        0.0,
        number,
        placeholder="SAMPLES",
    ),
)


_MEASURING = (
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
    Flag(
        ("--json-counters",),
        MEASURING,
        "Write the counters of the device to this file.",
        placeholder="FILE",
        inert="there is no device that counts",
    ),
    Flag(
        ("--num-sections",),
        MEASURING,
        "Sections that are measured.",
        None,
        at_least_one,
        placeholder="N",
        inert="all sections are measured",
    ),
)


FLAGS: tuple[Flag, ...] = (*_COMMON, *_COMPILE, *_WITH_PEF, *_MEASURING)
"""All flags, in the order in which help lists them."""
