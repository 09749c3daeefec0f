"""What apps rely on, and no name stands for."""

from sambasim.samba.fidelity.row import Row, Status

SAME, SIMPLIFIED, NO_EFFECT, ABSENT = Status.SAME, Status.SIMPLIFIED, Status.NO_EFFECT, Status.ABSENT

BEHAVIOURS: tuple[Row, ...] = (
    Row(
        "`import sambaflow`",
        SAME,
        "under the door in `door/`. An installed SambaFlow is used instead, with a notice",
        test="tests/samba/door/test_scripts.py::test_an_installed_sambaflow_is_given_way_to",
    ),
    Row(
        "a name that is not here",
        SAME,
        "an ImportError or AttributeError, which says what is near it",
        test="tests/samba/test_fidelity.py::test_a_name_that_is_absent_raises_and_tells_what_is_near",
    ),
    Row(
        "commands of an app",
        SAME,
        "compile, run, test, measure-performance, measure-sections",
        test="tests/samba/utils/test_argparser.py::test_each_function_adds_its_flags_to_its_command",
    ),
    Row(
        "`--pef_name` for `--pef-name`",
        SAME,
        "either spelling of every flag",
        test="tests/samba/utils/test_argparser.py::test_both_spellings_of_a_flag_are_taken",
    ),
    Row(
        "flags that app and library both have",
        SAME,
        "the app's count",
        test="tests/samba/utils/test_argparser.py::test_an_apps_flag_of_the_same_name_wins_with_its_default",
    ),
    Row(
        "flags without an effect here",
        SIMPLIFIED,
        "taken; those that were typed are named in one notice",
        test="tests/samba/utils/test_argparser.py::test_flags_that_change_nothing_are_told_once",
    ),
    Row(
        "`-ws` on run",
        SAME,
        "refused, with the explanation that mpirun decides",
        test="tests/samba/utils/test_argparser.py::test_the_number_of_replicas_is_for_mpirun_to_say",
    ),
    Row(
        "fewer replicas than `-ws`",
        SIMPLIFIED,
        "refused before any work; there, a segmentation fault was reported",
        test="tests/samba/utils/test_context.py::test_fewer_ranks_than_were_asked_for_are_refused",
    ),
    Row(
        "`torch.distributed` after `parse_app_args`",
        SAME,
        "gloo, with --data-parallel on a command that runs",
        test="tests/samba/utils/test_context.py::test_two_ranks_find_each_other_where_the_run_is_data_parallel",
    ),
    Row(
        '`init_process_group` of the app\'s own, `.to("cuda")`',
        ABSENT,
        "refused with the app's line: `parse_app_args` does the one, and the other is what sections are for",
        test="tests/samba/door/test_scripts.py::test_what_is_written_for_another_machine_is_told_with_what_to_do",
    ),
    Row(
        "launch by mpirun, srun",
        SAME,
        "`mpirun -np N`, `--host`, `-hosts`; an MPI that fits mpi4py",
        test="tests/mpi/test_flavours.py::test_ranks_run_on_the_mpi_that_was_chosen_and_so_does_mpirun",
    ),
    Row(
        "`OMP_NUM_THREADS`",
        SAME,
        "the threads of a rank, where --threads is not given",
        test="tests/parity/test_world_size.py::test_an_emulation_takes_the_threads_that_as_many_ranks_would_get",
    ),
    Row(
        "`SN_NUM_THREADS`, `SF_RNT_…`, `SAMBA_CCL_…`, `CCL_TIMEOUT`, `SAMBA_SEED`",
        NO_EFFECT,
        "not looked at: they tune a device and its transport; seeds are `utils.set_seed`'s",
    ),
    Row(
        "weights of host and device",
        SAME,
        "separate, until `to_cpu` and `to_device`",
        test="tests/samba/test_session.py::test_host_and_device_have_weights_of_their_own",
    ),
    Row(
        "`model(x)` on the host",
        SAME,
        "what PyTorch computes, from the weights of the last `to_cpu`",
        test="tests/samba/api/test_session.py::test_weights_move_between_host_and_device",
    ),
    Row(
        "inputs bind by name",
        SAME,
        "by place where tensors have no names; a mismatch names both sides",
        test="tests/samba/test_session.py::test_inputs_bind_by_name_and_then_by_place",
    ),
    Row(
        "a last partial batch",
        SAME,
        "refused (AP01), with the remedy `drop_last=True`",
        test="tests/samba/test_session.py::test_a_batch_that_does_not_fit_is_refused",
    ),
    Row(
        "batches along another axis than 0",
        ABSENT,
        "refused at compile",
        test="tests/samba/test_behaviours.py::test_batches_along_another_axis_are_refused",
    ),
    Row(
        "forward, backward, optimizer in parts",
        SAME,
        "gradients of backwards before an OPT add up",
        test="tests/runtime/test_stepwise.py::test_backwards_before_an_optimizer_step_add_up",
    ),
    Row(
        "sections without OPT",
        SIMPLIFIED,
        "FWD is that of the training graph, so it changes BatchNorm's statistics; `…__grad` after a data parallel step "
        "is a replica's own or the mean, as its sync left it",
        test="tests/samba/test_behaviours.py::test_a_forward_alone_changes_the_statistics_of_batch_norm",
    ),
    Row(
        "no `zero_grad()`",
        SAME,
        "the optimizer is in the graph",
        test="tests/samba/api/test_models.py::test_an_optimizer_steps_on_the_device_as_torchs_does_on_the_host",
    ),
    Row(
        "several optimizers, several parameter groups",
        SAME,
        "`max_grad_norm` must be the same for all",
        test="tests/samba/test_session.py::test_several_optimizers_and_groups_train_together",
    ),
    Row(
        "momentum of 0 turned on by `hyperparam_dict`",
        ABSENT,
        "refused: compile with momentum above 0",
        test="tests/samba/test_behaviours.py::test_momentum_that_was_not_compiled_cannot_be_turned_on",
    ),
    Row(
        "`loss.sn_grad`",
        SIMPLIFIED,
        "the backward starts from the first output alone; without `sn_grad`, from the gradient of its mean",
        test="tests/samba/test_session.py::test_the_backward_starts_from_sn_grad",
    ),
    Row(
        "several losses",
        ABSENT,
        "the first output is the loss; `loss_indices` with another is refused",
        test="tests/samba/test_behaviours.py::test_another_output_cannot_be_the_loss",
    ),
    Row(
        "`torch.compile` inside of a model",
        NO_EFFECT,
        "what is given to it is captured as it is written",
        test="tests/samba/test_behaviours.py::test_what_is_given_to_torch_compile_is_captured_as_it_is_written",
    ),
    Row(
        "`loss.mean()`",
        SAME,
        "works on a loss for each sample, and on a scalar",
        test="tests/samba/test_session.py::test_outputs_are_tensors_to_calculate_with",
    ),
    Row(
        "`model.run(inputs, …)` of old apps",
        SAME,
        "`session.run`, where the class has no `run` of its own",
        test="tests/samba/api/test_models.py::test_a_model_of_an_old_app_runs_itself",
    ),
    Row(
        "`model.output_tensors`",
        SIMPLIFIED,
        "always a tuple; `trace_graph` returns one tensor where there is one",
        test="tests/samba/test_behaviours.py::test_output_tensors_are_a_tuple_and_trace_graph_returns_one_tensor",
    ),
    Row(
        "checkpoint and resume",
        SAME,
        "`state_dict` after `to_cpu`; loaded before `trace_graph`, which sends it on",
        test="tests/samba/test_session.py::test_a_checkpoint_goes_on_where_it_was",
    ),
    Row(
        "optimizer state, device sync, several nodes",
        ABSENT,
        "it lies in slices on each node, and cannot be brought to a host: sync through the host where it is saved",
    ),
    Row(
        "sync of gradients",
        SAME,
        "the mean; host and device sync give the same bits",
        test="tests/mpi/test_exactness.py::test_device_host_and_emulation_are_equal_for_every_example",
    ),
    Row(
        "the PEF's path",
        SAME,
        "`OUTPUT_FOLDER/NAME/NAME.pef`, and the two lines that compile prints",
        test="tests/samba/api/test_session.py::test_compile_as_apps_do",
    ),
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
        test="tests/samba/test_bf16.py::test_outputs_are_bf16_and_the_loss_is_fp32",
    ),
    Row(
        "labels converted to int16",
        SIMPLIFIED,
        "labels of int16 are taken, others stay what they are; `--check` tells of those that int16 cannot hold",
        test="tests/samba/test_bf16.py::test_labels_may_be_int16_when_it_is_compiled_and_when_it_runs",
    ),
    Row(
        "time on the device",
        SIMPLIFIED,
        "predicted by a model, as `sambasim simulate` does, in a column of its own beside what an app measures",
        test="tests/samba/api/test_measuring.py::test_every_section_is_measured",
    ),
    Row(
        "RDUs of a node",
        SIMPLIFIED,
        "a node of MPI is one simulated node, of 8 RDUs or 16 (`sambasim devices`); more replicas than it seats are "
        "refused, and several share an RDU where the PEF was compiled with `--num-tiles`",
        test="tests/mpi/test_placement.py::test_nine_replicas_of_an_app_are_refused_in_its_own_words",
    ),
    Row("model parallelism", ABSENT, "one replica is one device, or some tiles of one"),
)
