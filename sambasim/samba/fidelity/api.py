"""The names of SambaFlow's Python API, as apps import and call them."""

from sambasim.samba.fidelity.row import Row, Status

SAME, SIMPLIFIED, NO_EFFECT = Status.SAME, Status.SIMPLIFIED, Status.NO_EFFECT

_OUTSIDE = (
    Row("__version__", SAME, "`1.19.0+sambasim.…`: the release whose shape this has, and who answers in its place"),
    Row("logging.samba_logger", SAME, "Python's logger `sambaflow`; every line names its rank"),
    Row("sambacollections.OrderedSet", SAME),
    Row("mac.metadata.ConvTilingMetadata", NO_EFFECT, "kept in the PEF as text; nothing is cut into tiles"),
)

_TENSORS = (
    Row("samba.randn", SAME, takes=("name", "batch_dim", "named_dims", "requires_grad")),
    Row("samba.randint", SAME, "`(high, shape)` or `(low, high, shape)`", ("shape", "name", "batch_dim")),
    Row("samba.from_torch_tensor", SAME, "shares memory with the tensor", ("name", "batch_dim")),
    Row("samba.from_torch", SAME, "the older name of `from_torch_tensor`", ("name", "batch_dim")),
    Row("samba.to_torch", SAME, "takes SambaTensors and plain tensors"),
    Row(
        "samba.SambaTensor",
        SIMPLIFIED,
        "a `torch.Tensor`. From a shape alone it holds zeros; a `materializer` is called at once; `is_complex` is "
        "refused; `sized_dims` and `region_name` are kept for the app to read",
        (
            "torch_tensor", "shape", "dtype", "name", "batch_dim", "named_dims", "sized_dims", "materializer",
            "is_complex", "region_name",
        ),
    ),
    Row(
        "samba.SambaTensor.torch",
        SAME,
        "also `.cpu()` and `.numpy()`, in the same memory; `.numpy()` of bf16 is a copy in float32",
    ),
    Row("samba.SambaTensor.rdu", SIMPLIFIED, "the tensor itself: a session sends it where it is needed"),
    Row("samba.SambaTensor.float", SAME, "chains as `.bfloat16().float()` do, keeping name and batch_dim"),
    Row("samba.SambaTensor.sn_data", SAME),
    Row("samba.SambaTensor.sn_grad", SAME, "of the first output: what the next backward starts from"),
    Row("samba.SambaTensor.has_data", SAME),
    Row("samba.SambaTensor.host_memory", NO_EFFECT, "kept for the app to read, as `mem_type` is"),
    Row("samba.sambatensor.SambaTensor", SAME, "the same class; the module has `from_torch_tensor`, `to_torch` too"),
    Row("samba.cat", SAME, "this and every other operator of torch: torch's own, by the same name"),
    Row("samba.sigmoid", SAME),
    Row("samba.addmm", SAME),
)  # fmt: skip

_MODELS = (
    Row(
        "samba.from_torch_model_",
        SAME,
        "in place; gives `model.name`, `parameter.sn_name`, and `model.run` of old apps, which is `session.run`",
        ("parent_module_prefix",),
    ),
    Row("samba.from_torch_model", SIMPLIFIED, "the same function, so in place too", ("parent_module_prefix",)),
    Row("samba.from_torch_", SAME, "the same function", ("parent_module_prefix",)),
    Row("samba.nn", SAME, "`torch.nn`, and SambaParameter"),
    Row("samba.nn.parameter.SambaParameter", SAME, "makes an `nn.Parameter`, and every `nn.Parameter` is one"),
    Row(
        "samba.lazy_param",
        SIMPLIFIED,
        "a context manager: what a model makes in it has shapes and no memory",
        name_alone=True,
    ),
    Row(
        "samba.materialize",
        SIMPLIFIED,
        "gives lazy parameters memory and the values of `reset_parameters`; `nn.init` and `apply` in an `__init__` are "
        "not repeated",
        name_alone=True,
    ),
    Row(
        "samba.directives.op_fusion",
        NO_EFFECT,
        "a context manager and a decorator, with any arguments; one notice says that it changes nothing",
        name_alone=True,
    ),
)

_OPTIMIZERS = tuple(
    Row(
        f"samba.optim.{name}",
        SAME,
        "on the host torch's; `max_grad_norm` bounds on the device the norm of all gradients together, on the host "
        "that of the optimizer's own",
        ("params", "lr", "weight_decay", "max_grad_norm", *own),
    )
    for name, own in (("SGD", ("momentum",)), ("Adam", ("betas", "eps")), ("AdamW", ("betas", "eps")))
)

_SESSION = (
    Row(
        "samba.session.compile",
        SAME,
        "the whole training step goes into a PEF; `squeeze_bs_dim`, `init_output_grads` and `io_host_memory` change "
        "nothing",
        (
            "model", "inputs", "optimizers", "name", "app_dir", "config_dict", "pef_metadata", "squeeze_bs_dim",
            "init_output_grads", "inference", "io_host_memory", "metadata",
        ),
    ),
    Row(
        "samba.session.run",
        SAME,
        "inputs bind by name, then by place; `graph_name` may be anything: a PEF has one graph to run",
        (
            "input_tensors", "output_tensors", "hyperparam_dict", "data_parallel", "reduce_on_rdu", "section_types",
            "graph_name",
        ),
    ),
    Row("samba.session.to_cpu", SAME, "weights, buffers and optimizer state; any rank alone may save them"),
    Row("samba.session.to_device", SAME),
    Row("samba.session.to_rdu", SAME),
    Row("samba.session.get_tensors_by_name", SAME, "copies"),
    Row("samba.session.tensor_dict", SAME, "inputs and outputs of the last run"),
    Row("samba.session.buffer_dict", SAME, "copies"),
    Row("samba.session.optim_dict", SAME, "the app's optimizers"),
    Row("samba.session.setup", SIMPLIFIED, "what `compile` takes for no `config_dict`", name_alone=True),
    Row("samba.session.tracing", SIMPLIFIED, "whether a forward is being traced, and not computed", name_alone=True),
    Row("samba.session.profiler.start_event", SIMPLIFIED, "times what the app brackets, on the host"),
    Row("samba.session.profiler.end_event", SIMPLIFIED, "the same"),
    Row("samba.session.profiler.event", SIMPLIFIED, "the same"),
    Row("samba.session.start_samba_profile", SIMPLIFIED, "`session.profiler` has an event for it", name_alone=True),
    Row("samba.session.end_samba_profile", SIMPLIFIED, "its end", name_alone=True),
    Row("samba.profiler.Profiler", SIMPLIFIED, "what `session.profiler` is; it times on the host", name_alone=True),
    Row("samba.profiler.Event", SIMPLIFIED, "of our own making: one of `Profiler.events`, a name and seconds"),
)  # fmt: skip

_UTILS = (
    Row(
        "samba.utils.trace_graph",
        SIMPLIFIED,
        "refuses another graph with the first difference and its source line. `init_output_grads`, `mapping`, "
        "`data_parallel_mode`, `distlearn_config`, `dev_mode` and `config_dict` change nothing; `loss_indices` "
        "may name the first output alone",
        (
            "model", "inputs", "optim", "init_output_grads", "loss_indices", "pef", "mapping", "data_parallel_mode",
            "transfer_device", "distlearn_config", "dev_mode", "config_dict",
        ),
    ),
    Row(
        "samba.utils.assert_close",
        SIMPLIFIED,
        "at most `threshold + rtol · abs(gold)` apart; a result in bf16 is allowed 1/256 of `gold` more",
        ("threshold", "rtol"),
    ),
    Row("samba.utils.set_seed", SAME, "torch, numpy and random"),
    Row("samba.utils.get_file_dir", SAME),
    Row("samba.utils.get_rank", SAME),
    Row("samba.utils.get_world_size", SAME),
    Row("samba.utils.is_main_process", SAME),
    Row(
        "samba.utils.measure_performance",
        SIMPLIFIED,
        "measured on this machine; beside it, apart, what the PEF's device is predicted to take. `n_chips` changes "
        "nothing",
        (
            "batch_size", "n_chips", "inference", "run_graph_only", "n_iterations", "min_duration", "json",
            "data_parallel", "reduce_on_rdu",
        ),
    ),
    Row(
        "samba.utils.measure_sections",
        SIMPLIFIED,
        "each section, measured on this machine, medians; beside them what the PEF's device is predicted to take, "
        "without the host. REDUCE, OPT and GATHER are one row where they are one pass over memory",
        ("batch_size", "n_iterations", "json", "data_parallel", "reduce_on_rdu"),
    ),
    Row("samba.utils.weight_norm_", SAME, "of each weight in the module, by torch's parametrization"),
    Row(
        "samba.utils.argparser.parse_app_args",
        SAME,
        "every flag of the library; the app's own win. `dev_mode` adds none",
        ("argv", "dev_mode", "common_parser_fn", "compile_parser_fn", "test_parser_fn", "run_parser_fn"),
    ),
    Row("samba.utils.argparser.parse_yaml_to_args", SIMPLIFIED, "from a file of names and values", name_alone=True),
    Row("samba.utils.argparser.SambaConfig", SIMPLIFIED, "from keywords; the app has its own", name_alone=True),
    Row("samba.utils.pef_utils.get_pefmeta", SAME, "every argument, the model's repr, versions"),
    Row("samba.utils.pef_utils.get_pefmeta_dict", SIMPLIFIED, "what `get_pefmeta` put into a PEF", name_alone=True),
    Row("samba.utils.pef_utils.get_pef_info", SIMPLIFIED, "what `sambasim inspect --json` prints", name_alone=True),
    Row(
        "samba.utils.common.common_app_driver",
        SAME,
        "compile, measure-performance and measure-sections; other keywords change nothing, unless one is nearly a "
        "known one: then it is refused (AP04), as by the two that measure",
        ("args", "model", "inputs", "optim", "name", "app_dir"),
    ),
    Row("samba.utils.dataset.mnist.dataset_transform", SAME, "needs no torchvision"),
    Row("samba.utils.benchmark_acc.AccuracyReport", SIMPLIFIED, "keeps figures; `save` as JSON", name_alone=True),
    Row("samba.utils.checkpoint.save_checkpoint", SIMPLIFIED, "of our own making, in a known module"),
    Row("samba.utils.checkpoint.load_checkpoint", SIMPLIFIED, "likewise"),
    Row(
        "samba.utils.tensorboard_debug.dump_accuracy_debug_info",
        SIMPLIFIED,
        "norms, extremes and differences to the host as lines of JSON; no event file",
        name_alone=True,
    ),
    Row("samba.SambaLoader", SAME, "`torch_loader` and the names; `len()` is the loader's"),
    Row("samba.sambaloader.SambaLoader", SAME, "the same class"),
    Row("samba.env.use_mock_samba_runtime", SIMPLIFIED, "returns False: every number is computed", name_alone=True),
    Row("samba.schema.snconfig.SNConfig", SIMPLIFIED, "keeps what the app gives it", name_alone=True),
    Row(
        "samba.test.TestWithGold",
        SIMPLIFIED,
        "writes the host's outputs to `--gold-file-path`, and compares the device's with them from then on",
        ("gold_file_path", "threshold", "rtol"),
        name_alone=True,
    ),
)  # fmt: skip

API: tuple[Row, ...] = (*_OUTSIDE, *_TENSORS, *_MODELS, *_OPTIMIZERS, *_SESSION, *_UTILS)
"""All of them, in the order of the page."""
