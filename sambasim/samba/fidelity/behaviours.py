"""What apps rely on, and no name stands for."""

from sambasim.samba.fidelity.row import Row, Status

SAME, SIMPLIFIED, NO_EFFECT, ABSENT = Status.SAME, Status.SIMPLIFIED, Status.NO_EFFECT, Status.ABSENT

BEHAVIOURS: tuple[Row, ...] = (
    Row("`import sambaflow`", SAME, "under the door in `door/`. An installed SambaFlow is used instead, with a notice"),
    Row("a name that is not here", SAME, "an ImportError or AttributeError, which says what is near it"),
    Row("commands of an app", SAME, "compile, run, test, measure-performance, measure-sections"),
    Row("`--pef_name` for `--pef-name`", SAME, "either spelling of every flag"),
    Row("flags that app and library both have", SAME, "the app's count"),
    Row("flags without an effect here", SIMPLIFIED, "taken; those that were typed are named in one notice"),
    Row("`-ws` on run", SAME, "refused, with the explanation that mpirun decides"),
    Row("fewer replicas than `-ws`", SIMPLIFIED, "refused before any work; there, a segmentation fault was reported"),
    Row("`torch.distributed` after `parse_app_args`", SAME, "gloo, with --data-parallel on a command that runs"),
    Row("launch by mpirun, srun", SAME, "`mpirun -np N`, `--host`, `-hosts`; an MPI that fits mpi4py"),
    Row("`OMP_NUM_THREADS`", SAME, "the threads of a rank, where --threads is not given"),
    Row(
        "`SN_NUM_THREADS`, `SF_RNT_…`, `SAMBA_CCL_…`, `CCL_TIMEOUT`, `SAMBA_SEED`",
        NO_EFFECT,
        "not looked at: they tune a device and its transport; seeds are `utils.set_seed`'s",
    ),
    Row("weights of host and device", SAME, "separate, until `to_cpu` and `to_device`"),
    Row("`model(x)` on the host", SAME, "what PyTorch computes, from the weights of the last `to_cpu`"),
    Row("inputs bind by name", SAME, "by place where tensors have no names; a mismatch names both sides"),
    Row("a last partial batch", SAME, "refused (AP01), with the remedy `drop_last=True`"),
    Row("batches along another axis than 0", ABSENT, "refused at compile"),
    Row("forward, backward, optimizer in parts", SAME, "gradients of backwards before an OPT add up"),
    Row(
        "sections without OPT",
        SIMPLIFIED,
        "FWD is that of the training graph, so it changes BatchNorm's statistics; `…__grad` after a data parallel step "
        "is a replica's own or the mean, as its sync left it",
    ),
    Row("no `zero_grad()`", SAME, "the optimizer is in the graph"),
    Row("several optimizers, several parameter groups", SAME, "`max_grad_norm` must be the same for all"),
    Row("momentum of 0 turned on by `hyperparam_dict`", ABSENT, "refused: compile with momentum above 0"),
    Row(
        "`loss.sn_grad`",
        SIMPLIFIED,
        "the backward starts from the first output alone; without `sn_grad`, from the gradient of its mean",
    ),
    Row("several losses", ABSENT, "the first output is the loss; `loss_indices` with another is refused"),
    Row("`loss.mean()`", SAME, "works on a loss for each sample, and on a scalar"),
    Row("`model.run(inputs, …)` of old apps", SAME, "`session.run`, where the class has no `run` of its own"),
    Row("`model.output_tensors`", SIMPLIFIED, "always a tuple; `trace_graph` returns one tensor where there is one"),
    Row("checkpoint and resume", SAME, "`state_dict` after `to_cpu`; loaded before `trace_graph`, which sends it on"),
    Row(
        "optimizer state, device sync, several nodes",
        ABSENT,
        "it lies in slices on each node, and cannot be brought to a host: sync through the host where it is saved",
    ),
    Row("sync of gradients", SAME, "the mean; host and device sync give the same bits"),
    Row("the PEF's path", SAME, "`OUTPUT_FOLDER/NAME/NAME.pef`, and the two lines that compile prints"),
    Row(
        "files beside the PEF",
        ABSENT,
        "logs of compiler stages, utilization, bandwidth, placement: `sambasim inspect` prints what is known",
    ),
    Row(
        "numerics",
        SIMPLIFIED,
        "fp32 by default, for the promise of exactness is of PyTorch's bits; an RDU has bf16. `--dtype bf16` imitates "
        "that: bf16 storage, fp32 accumulation, losses in fp32",
    ),
    Row(
        "labels converted to int16",
        SIMPLIFIED,
        "labels of int16 are taken, others stay what they are; `--check` tells of those that int16 cannot hold",
    ),
    Row("time on the device", ABSENT, "not modelled yet: predictions are a dash, in JSON null"),
    Row("model parallelism", ABSENT, "one replica is one device"),
)
