"""Bad input of meshes: cuts and schedules that cannot be, and runs that do not fit a PEF of several ranks."""

from collections.abc import Callable
from pathlib import Path

from tests.faults.fault import TRAIN, Fault, net, table
from tests.pef.damage import Fields, change_fields

DEEP = net(
    "return self.last(torch.relu(self.first(x)))", init="self.first = nn.Linear(8, 8)\nself.last = nn.Linear(8, 3)"
)
"""Two layers: what the PEFs of several ranks are compiled from."""

_STAGES = f"{TRAIN} --pipeline-stages 2 --micro-batches 2"
_IN_FILE = f"{_STAGES} --schedule mine.csv"


def _written(rows: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "mine.csv").write_text(rows.replace(" / ", "\n") + "\n")


def _with_rows(*rows: str) -> Callable[[Path], object]:
    """The PEF `stages`, with other rows of its schedule, whose numbers are those of stage and micro-batch."""

    def change(fields: Fields) -> None:
        cells = [[(cell[1], int(cell[0]), int(cell[2])) for cell in row.split(",")] for row in rows]
        fields["graphs"]["stages"]["program"]["schedule"]["rows"] = [
            [{"kind": kind, "stage": stage, "micro_batch": number} for kind, stage, number in row] for row in cells
        ]

    return lambda folder: change_fields(folder / "out" / "stages" / "stages.pef", change)


CUTS: tuple[Fault, ...] = (
    *table(
        f"""
{TRAIN} --tensor-parallel weight --n-chips 5
    no tensor of net can be cut over 5 ranks ... --n-chips 2, 4 or 8, or leave out --tensor-parallel
{TRAIN} --tensor-parallel batch --n-chips 1000000000
    parallel.n_chips = 1000000000 (from --n-chips): must be at most 16,384
{TRAIN} --tensor-parallel batch --n-chips 3
    parallel.n_chips = 3 (from --n-chips): does not divide the batch of 4 samples ... --batch-size 6
{TRAIN} -b 65536 --pipeline-stages 2 --micro-batches 65536
    a schedule of 2 ranks and 65,536 micro-batches is too long ... fewer --pipeline-stages or --micro-batches
{_STAGES} --schedule zbh1
    there is no schedule zbh1 ... --schedule gpipe | 1f1b | interleaved-1f1b | zb-h1 | FILE.csv
{_STAGES} --zero 3
    parallel.zero = 3 (from --zero): needs data parallelism ... add --data-parallel
""",
        net=DEEP,
    ),
    Fault(
        f"{TRAIN} --tensor-parallel weight --n-chips 2",
        "no tensor of net can be cut over 2 ranks ... try:   leave out --tensor-parallel",
        net(),
    ),
    Fault(
        f"{TRAIN} --pipeline-stages 2", "net cannot be cut into 2 stages ... try:   leave out --pipeline-stages", net()
    ),
    Fault(
        f"{TRAIN} --pipeline-stages 3",
        "share the buffer norm. ... which a step changes ... use fewer --pipeline-stages, or give each module a buffer",
        net(
            "first, second, last = self.layers\nreturn last(self.norm(second(torch.relu(first(self.norm(x))))))",
            init="self.norm = nn.BatchNorm1d(8, affine=False)\n"
            "self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
        ),
    ),
)

_SCHEDULES = """
0F0,0F1,0B0,0B1,2F0,2F1,2B0,2B1 / 1F0,1F1,1B0,1B1,3F0,3F1,3B0,3B1
    0B0 on rank 0 waits for 1B0; 1B0 on rank 1 waits for 2B0 ... try:   move 2B0 to before 0B0
0F0,0F1,0B0,0B1
    mine.csv has 1 rank and 2 micro-batches, not 2 and 2 ... write a row for each of the 2 ranks
0F0,0F1,0B0,0B1 / 1F0,1B0,1F1,1B1 / 2F0,2B0,2F1,2B1
    mine.csv has 3 ranks and 2 micro-batches, not 2 and 2 ... --pipeline-stages 3 --micro-batches 2
"""
"""Rows of a schedule's file, where a slash begins the next one, and what is said of them."""

FILES = tuple(Fault(_IN_FILE, row.says, DEEP, _written(row.command)) for row in table(_SCHEDULES))

_PIPED = "--pef stages --data synthetic --no-evaluate --steps 2"

RUNS: tuple[Fault, ...] = (
    *table(f"""
run {_PIPED} --host-sync parameter-server --parameter-servers 1
    --host-sync parameter-server syncs replicas of one rank, and a replica of the PEF stages has 2 (pp 2) ...
    leave out --host-sync and --parameter-servers: MPI through the host
run --pef slices --emulate-replicas 2 --debug-numerics
    --debug-numerics needs whole gradients ... --zero 3
run {_PIPED} --debug-numerics
    --debug-numerics cannot watch a pipeline yet ... leave out --debug-numerics
run --pef slices --emulate-replicas 2 --host-sync gloo
    gloo keeps gradients whole, and the replicas of the PEF slices keep slices (--zero 3) ... leave out --host-
run --pef cut --emulate-replicas 2
    --emulate-replicas 2 was given, but this PEF has no REDUCE ... or run one replica: mpirun -np 2 sambasim
run --pef slices
    at least 2 replicas (-ws 2), and 1 replica was started ... mpirun -np 2 sambasim run --pef slices
run {_PIPED} --zero 2
    --zero is for compile: a run takes what the PEF was compiled with ... sambasim compile … --zero 2
run {_PIPED} --set parallel.pipeline_stages=1
    parallel.pipeline_stages = 1: is compiled into the PEF ... sambasim compile … --set parallel.pipeline_stages
run --pef cut --engine inductor
    cannot compile a pass that communicates, and that of the PEF cut does ... run it with --engine plain
run {_PIPED} --record-digests d
    --record-digests cannot watch a pipeline yet ... leave out --record-digests, or compile without
tilestat --pef stages
    a replica of stages has 2 ranks (pp 2) ... try:   sambasim simulate stages predicts all of its ranks
simulate --pef guesses
    the PEF guesses is for inference, and only training is predicted on several ranks ... compile it for training
simulate --pef stages --replicas 2
    the PEF stages has one replica ... compile it with --data-parallel, or leave out --replicas
inspect --pef cut --schedule
    cut is no pipeline, so it has no schedule ... sambasim compile --pipeline-stages 2
"""),
    Fault(
        f"run {_PIPED}",
        "error[pef]: stages.pef breaks rule 10 ... "
        "invariant 16: the schedule cannot run: the schedule has a deadlock: 0B0 on rank 0 waits for 1B0 ... "
        "compile",
        prepare=_with_rows("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"),
    ),
    Fault(
        "run --pef cut --data net.py:samples --steps 1 --debug-numerics",
        "the loss is not finite on rank 1 (tp 1), step 1 ... the input x of the batch of rank 1 (tp 1) holds nan",
        net(samples="return TensorDataset(torch.full((16, 8), torch.nan), torch.arange(16) % 3)"),
    ),
)

PARALLELISM = (*CUTS, *FILES, *RUNS)
