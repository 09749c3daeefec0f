"""Flags: unknown, of the wrong type, contradicting each other, or not fitting the PEF."""

from tests.faults.fault import Fault
from tests.faults.texts import COMPILE, NAMED_LOSS, TRAIN, net

NET = {"net.py": net()}

FLAGS: tuple[Fault, ...] = (
    Fault("a command that is none", "compil", 2, ("error[usage]", "No such command 'compil'. Did you mean 'compile'?")),
    Fault(
        "a command that is nothing like one",
        "fly",
        2,
        ("No such command 'fly'. They are compile, run, app, env, inspect", "sambasim --help"),
    ),
    Fault(
        "an unknown flag of compile",
        "compile --data-paralel",
        2,
        ("error[usage]", "No such option '--data-paralel'. Did you mean '--data-parallel'?", "sambasim compile --help"),
    ),
    Fault(
        "an unknown flag of run",
        "run --pef net --reduce_on_rdus",
        2,
        ("No such option '--reduce-on-rdus'", "'--reduce-on-rdu'", "try:   sambasim run --help"),
        pefs=("net",),
    ),
    Fault("no value", "run --pef", 2, ("Option '--pef' requires an argument.", "try:   sambasim run --help")),
    Fault("no PEF", "run --steps 3", 2, ("Missing option '-p' / '--pef'.", "try:   sambasim run --help")),
    Fault("a word too many", "compile net.py:Net again", 2, ("unexpected extra argument (again)",), NET),
    Fault(
        "a word for a number", "compile -b four", 2, ("'-b' / '--batch-size': 'four' is not a valid integer", "--help")
    ),
    Fault(
        "an unknown device",
        "compile --arch sn31",
        2,
        ("'--arch': 'sn31' is not one of 'sn10', 'sn20', 'sn30', 'sn40'", "sambasim compile --help"),
    ),
    Fault("an unknown engine", "run --pef net --engine turbo", 2, ("'--engine': 'turbo' is not",), pefs=("net",)),
    Fault(
        "replicas without data parallelism",
        "compile -ws 2",
        2,
        ("error[option]", "compile.world_size = 2 (from --world-size): needs data parallelism", "add --data-parallel"),
    ),
    Fault(
        "no replicas",
        "compile --data-parallel -ws 0",
        2,
        ("compile.world_size = 0 (from --world-size): must be at least 1",),
    ),
    Fault(
        "inference with data parallelism",
        "compile --inference --data-parallel",
        2,
        ("cannot be with inference, which has no gradients to reduce", "leave out --data-parallel or --inference"),
    ),
    Fault(
        "no optimizer",
        "compile net.py:Net --set data.source=net.py:samples",
        2,
        ("optimizer.name: is missing, and training needs one", "--set optimizer.name=adamw (or --inference)"),
        NET,
    ),
    Fault(
        "a name with a folder in it",
        f"{TRAIN} --pef-name nets/net",
        2,
        ("must be a plain file name", "--output-folder says where it goes"),
        NET,
    ),
    Fault(
        "an unknown loss",
        f"{COMPILE} --set loss.name=crossentropy",
        2,
        ('loss.name = "crossentropy" (from --set)', "must be cross_entropy, mse, l1", "did you mean cross_entropy?"),
        NET,
    ),
    Fault(
        "a setting without a value",
        f"{TRAIN} --set optimizer.lr",
        2,
        ("--set optimizer.lr has no value", "--set optimizer.lr=VALUE"),
        NET,
    ),
    Fault(
        "a setting that is none",
        f"{TRAIN} --set optimizer.momentun=1",
        2,
        ("optimizer.momentun (from --set): is no option", "did you mean optimizer.momentum?"),
        NET,
    ),
    Fault(
        "several at once",
        f"{COMPILE} {NAMED_LOSS} -ws 3 --set optimizer.lr=-1 --set training.seed=x",
        2,
        (
            "3 options are wrong:",
            "optimizer.lr = -1 (from --set): must be at least 0",
            'training.seed = "x" (from --set): must be a whole number',
            "compile.world_size = 3 (from --world-size): needs data parallelism (add --data-parallel)",
            "correct each of them",
        ),
        NET,
    ),
    Fault(
        "-ws for a run",
        "run --pef pair -ws 2",
        2,
        ("-ws is for compile", "a run has as many as mpirun starts", "mpirun -np 2 sambasim run"),
        pefs=("pair",),
    ),
    Fault("no steps", "run --pef net --steps 0", 2, ("training.steps = 0: must be at least 1",), pefs=("net",)),
    Fault(
        "steps beside epochs",
        "run --pef net --steps 3 --epochs 1",
        2,
        ("training.steps = 3: cannot be given beside epochs, 1", "leave out training.epochs or training.steps"),
        pefs=("net",),
    ),
    Fault("no threads", "run --pef net --threads 0", 2, ("threads = 0 (from --threads): must be at least 1",)),
    Fault(
        "a learning rate that is no number", "run --pef net --lr nan", 2, ("optimizer.lr = nan (from --lr): must be",)
    ),
    Fault(
        "another batch size at run time",
        "run --pef net --set training.batch_size=8",
        2,
        ("training.batch_size = 8: cannot change: the PEF was compiled as 4", "compile again: sambasim compile"),
        pefs=("net",),
    ),
    Fault(
        "another loss at run time",
        "run --pef net --set loss.name=mse",
        2,
        ('loss.name = "mse": cannot change: the PEF was compiled as "cross_entropy"', "compile again"),
        pefs=("net",),
    ),
    Fault(
        "momentum at run time",
        "run --pef net --momentum 0.9",
        2,
        ("optimizer.momentum = 0.9: cannot be turned on", "--set optimizer.momentum=0.9"),
        pefs=("net",),
    ),
    Fault(
        "predictions of a training",
        "run --pef net --predictions p.safetensors",
        2,
        ("predictions (from --predictions): are made by inference only", "add --inference"),
        pefs=("net",),
    ),
    Fault(
        "sync through the host and between devices",
        "run --pef net --host-sync gloo --reduce-on-rdu",
        2,
        (
            'host_sync = "gloo" (from --host-sync): is sync through the host, and --reduce-on-rdu is sync between',
            "leave out one of the two",
        ),
        pefs=("net",),
    ),
    Fault(
        "a way through the host that is none",
        "run --pef net --host-sync nccl",
        2,
        ("'nccl' is not one of 'mpi', 'gloo', 'parameter-server'", "sambasim run --help"),
        pefs=("net",),
    ),
    Fault(
        "servers without a parameter server",
        "run --pef net --parameter-servers 1",
        2,
        ("parameter_servers = 1 (from --parameter-servers): serve nobody", "add --host-sync parameter-server"),
        pefs=("net",),
    ),
    Fault(
        "metrics of an inference",
        "run --pef net --inference --metrics m.jsonl",
        2,
        ("metrics (from --metrics): is for training, and this is inference", "leave out --metrics"),
        pefs=("net",),
    ),
    Fault(
        "training with a PEF for inference",
        "run --pef guess",
        2,
        ("this PEF was compiled for inference and cannot train", "add --inference"),
        pefs=("guess",),
    ),
    Fault(
        "too few replicas",
        "run --pef pair",
        2,
        (
            "error[launch]",
            "compiled for at least 2 replicas (-ws 2), and 1 was started",
            "mpirun -np 2 sambasim run --pef pair",
        ),
        pefs=("pair",),
    ),
    Fault(
        "too few replicas to emulate",
        "run --pef pair --emulate-replicas 1",
        2,
        (
            "at least 2 replicas (-ws 2), and --emulate-replicas 1 was asked for",
            "try:   sambasim run --pef pair --emulate-replicas 2",
        ),
        pefs=("pair",),
    ),
    Fault(
        "replicas to emulate of a PEF for one",
        "run --pef net --emulate-replicas 2",
        2,
        (
            "this PEF has no REDUCE and GATHER sections",
            "compile it with --data-parallel -ws 2",
            "sambasim run --pef net\n",
        ),
        pefs=("net",),
    ),
    Fault(
        "data parallelism of a PEF for one",
        "run --pef net --data-parallel",
        2,
        (
            "--data-parallel needs REDUCE and GATHER sections, and the PEF net has none",
            "compile it with --data-parallel",
        ),
        pefs=("net",),
    ),
)
