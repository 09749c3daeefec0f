"""The flags of an app's command line. Why one has no effect is said in `utils.flags`, and here not again."""

from sambasim.samba.fidelity.row import Row, Status

SAME, SIMPLIFIED, NO_EFFECT = Status.SAME, Status.SIMPLIFIED, Status.NO_EFFECT

FLAG_ROWS: tuple[Row, ...] = (
    Row("--batch-size", SAME, "of a replica; another one needs another compile"),
    Row("--microbatch-size", NO_EFFECT),
    Row(
        "--grad-accumulation-steps",
        SIMPLIFIED,
        "for the app to read, which runs FWD and BCKWD as often before each OPT",
    ),
    Row("--inference", SAME, "for compile, and for run too"),
    Row("--data-parallel", SAME),
    Row("--data-parallel-mode", NO_EFFECT),
    Row("--mapping", NO_EFFECT),
    Row("--dtype", SIMPLIFIED, "of our own making: fp32, unless compile says bf16, which is the RDU's default"),
    Row("--log-level", SAME, "of `samba_logger`"),
    Row("--verbose", NO_EFFECT),
    Row("--debug", NO_EFFECT),
    Row("--distlearn-config", NO_EFFECT),
    Row("--gold-file-path", SIMPLIFIED, "where `TestWithGold` writes what it expects, and reads it from; else nothing"),
    Row("--visualize", NO_EFFECT),
    Row("--enable-profiler", NO_EFFECT),
    Row("--pef-name", SAME, "by default time and process"),
    Row("--output-folder", SAME),
    Row("--world-size", SAME, "the least number of replicas; on run it is refused: mpirun decides"),
    Row("--o0", SAME, "one operator a section"),
    Row("--o1", SIMPLIFIED, "operators fused by sambasim's own rules"),
    Row("--o3", SIMPLIFIED, "the cut that sambasim predicts to be fastest"),
    Row("--arch", SIMPLIFIED, "its memory must hold the PEF, and sections are cut for its units"),
    Row("--enable-stoc-rounding", SIMPLIFIED, "with `--dtype bf16`, of optimizer steps alone; seeded"),
    Row("--num-spatial-batches", NO_EFFECT),
    Row("--n-chips", NO_EFFECT),
    Row("--num-tiles", SIMPLIFIED, "sections are cut for so many tiles; -1 is all of the device"),
    Row("--tensor-parallel", NO_EFFECT),
    Row("--optim-level", NO_EFFECT),
    Row("--compiler-configs-file", NO_EFFECT),
    Row("--mac-human-decision", NO_EFFECT),
    Row("--resources-scaling-factors", NO_EFFECT),
    Row("--pef", SAME, "a path, or a name, found as `out/NAME/NAME.pef`"),
    Row(
        "--reduce-on-rdu",
        SAME,
        "replicas of a node read each other's device memory; between nodes slices travel by MPI",
    ),
    Row("--threads", SIMPLIFIED, "of our own making: threads are numerics"),
    Row("--num-iterations", SAME),
    Row("--min-duration", SAME),
    Row("--run-graph-only", SIMPLIFIED, "a step is the sum of its sections, one after another"),
    Row("--json", SAME, "to a file, or without one to stdout"),
    Row("--bench-report-json", SAME, "what was measured"),
    Row("--compiled-stats-json", SIMPLIFIED, "what `sambasim inspect --json` prints of the PEF"),
)
"""One for each flag, in the order of help."""
