"""`samba.utils` and what lies beside it: command line, data, reports, checkpoints, gold files."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sambasim.errors import DataError, OptionError, WeightsError
from tests.samba.api.conftest import BATCH, Net, exercises, imported, seeded_net


@exercises("samba.utils.assert_close")
def test_assert_close(samba: Any) -> None:
    samba.utils.assert_close(samba.randn(2) * 0, torch.full((2,), 2e-3), "logits", threshold=3e-3)
    samba.utils.assert_close(torch.tensor(101.0), torch.tensor(100.0), "loss", threshold=0, rtol=0.01)
    with pytest.raises(AssertionError, match="logits: 1 of 2 elements differ"):
        samba.utils.assert_close(torch.tensor([0.0, 1.0]), torch.zeros(2), "logits")


@exercises("samba.utils.set_seed", "samba.utils.get_file_dir")
def test_seed_and_folder(samba: Any) -> None:
    samba.utils.set_seed(7)
    first = torch.rand(3), np.random.rand()
    samba.utils.set_seed(7)
    assert torch.equal(first[0], torch.rand(3))
    assert first[1] == np.random.rand()
    assert samba.utils.get_file_dir(__file__) == str(Path(__file__).parent)


@exercises("samba.utils.get_rank", "samba.utils.get_world_size", "samba.utils.is_main_process")
def test_ranks_of_a_process_alone(samba: Any) -> None:
    utils = samba.utils
    assert (utils.get_rank(), utils.get_world_size(), utils.is_main_process()) == (0, 1, True)


@exercises("samba.utils.weight_norm_")
def test_weight_norm(samba: Any) -> None:
    linear = nn.Linear(3, 2)
    before = linear(torch.ones(1, 3))
    assert samba.utils.weight_norm_(linear) is linear
    torch.testing.assert_close(linear(torch.ones(1, 3)), before)
    assert len(list(linear.parameters())) == 3


@exercises("samba.utils.argparser.parse_app_args")
def test_the_command_line_of_an_app() -> None:
    def common(parser: ArgumentParser) -> None:
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("-b", "--batch-size", type=int, default=16)

    parse = imported("samba.utils.argparser").parse_app_args
    of_commands = {
        f"{name}_parser_fn": lambda parser, name=name: parser.add_argument(f"--{name}-only", default=name)
        for name in ("compile", "test", "run")
    }
    args = parse(["run", "-p", "x.pef", "--lr", "0.5"], True, common_parser_fn=common, **of_commands)
    assert (args.command, args.pef, args.lr, args.batch_size, args.run_only) == ("run", "x.pef", 0.5, 16, "run")
    assert (args.data_parallel, args.world_size, args.mapping) == (False, 1, "section")
    assert not hasattr(args, "test_only")
    assert parse(argv=["test", "--pef", "x"], common_parser_fn=common, **of_commands).test_only == "test"
    assert parse(argv=["compile", "--pef_name", "net"]).pef_name == "net"
    with pytest.raises(OptionError, match="-ws is for compile"):
        parse(argv=["run", "--pef", "x", "-ws", "2"])


@exercises("samba.utils.argparser.SambaConfig", "samba.utils.argparser.parse_yaml_to_args")
def test_the_same_from_keywords_and_from_a_file(tmp_path: Path) -> None:
    argparser = imported("samba.utils.argparser")
    config = argparser.SambaConfig("compile", batch_size=8, hidden=64)
    (tmp_path / "app.yaml").write_text("command: compile\nbatch-size: 8\nhidden: 64\npef_name: net\n")
    read = argparser.parse_yaml_to_args(tmp_path / "app.yaml")
    assert (config.batch_size, config.hidden) == (read.batch_size, read.hidden) == (8, 64)
    assert read.pef_name == "net"


@exercises("samba.utils.dataset.mnist.dataset_transform")
def test_images_become_normalised_features() -> None:
    transform_for = imported("samba.utils.dataset.mnist").dataset_transform
    image = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    flat = transform_for({"num_features": 12})(image)
    gold = (torch.from_numpy(image) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(flat, gold.flatten())
    kept = transform_for({"num_features": None})
    for given in (image, image[..., None], torch.from_numpy(image), torch.from_numpy(image)[None]):
        torch.testing.assert_close(kept(given), gold[None])
    torch.testing.assert_close(kept(torch.from_numpy(image) / 255), gold[None])
    with pytest.raises(DataError, match="an image has 12 pixels, and num_features is 784"):
        transform_for({"num_features": 784})(image)
    with pytest.raises(DataError, match=r"has the shape \(3, 4, 3\), and images like MNIST's have one channel"):
        kept(np.zeros((3, 4, 3)))


@exercises("samba.utils.benchmark_acc.AccuracyReport")
def test_an_accuracy_report_is_saved(tmp_path: Path) -> None:
    report_of = imported("samba.utils.benchmark_acc").AccuracyReport
    report = report_of(val_accuracy=torch.tensor(97.5), batch_size=32, num_iterations=1000)
    report.save(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == {"val_accuracy": 97.5, "batch_size": 32, "num_iterations": 1000}
    assert report.val_accuracy == 97.5
    assert report_of(loss=torch.tensor(torch.nan)).loss == "nan", "JSON has no number for it"
    with pytest.raises(AttributeError, match="this report has no loss; it has val_accuracy, batch_size"):
        _ = report.loss
    with pytest.raises(OptionError, match="losses is of type list"):
        report_of(losses=[1, 2])
    with pytest.raises(OptionError, match=r"cannot be written: No such file"):
        report.save(tmp_path / "no" / "report.json")


@exercises("samba.utils.checkpoint.save_checkpoint", "samba.utils.checkpoint.load_checkpoint")
def test_training_goes_on_from_a_checkpoint(
    samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any], pef: str, tmp_path: Path
) -> None:
    checkpoint = imported("samba.utils.checkpoint")
    model, optimizer = traced
    file = tmp_path / "after_1.pt"
    samba.session.run(inputs)
    checkpoint.save_checkpoint(file, model, optimizer, epoch=1)
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"
    samba.session.run(inputs)
    samba.session.to_cpu(model)
    resumed = samba.from_torch_model_(Net())
    optimizer = samba.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    assert checkpoint.load_checkpoint(file, resumed, optimizer) == {"epoch": 1}
    samba.utils.trace_graph(resumed, inputs, optimizer, pef=pef)
    samba.session.run(inputs)
    samba.session.to_cpu(resumed)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_a_checkpoint_that_does_not_fit_is_refused(
    samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any], tmp_path: Path
) -> None:
    checkpoint = imported("samba.utils.checkpoint")
    model, optimizer = traced
    file = tmp_path / "net.pt"
    checkpoint.save_checkpoint(file, model, optimizer)
    with pytest.raises(WeightsError, match="has the state of 1 optimizers, and 0 are given"):
        checkpoint.load_checkpoint(file, model)
    with pytest.raises(WeightsError, match="is of another model"):
        checkpoint.load_checkpoint(file, Net(width=16), optimizer)
    with pytest.raises(WeightsError, match="cannot be read as a checkpoint"):
        checkpoint.load_checkpoint(tmp_path / "absent.pt", model, optimizer)
    torch.save(model.state_dict(), file)
    with pytest.raises(WeightsError, match="was not written by save_checkpoint"):
        checkpoint.load_checkpoint(file, model, optimizer)
    with pytest.raises(OptionError, match="the checkpoint cannot be written"):
        checkpoint.save_checkpoint(tmp_path / "no" / "net.pt", model, optimizer)


@exercises("samba.utils.tensorboard_debug.dump_accuracy_debug_info")
def test_figures_of_every_tensor_are_dumped(
    samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any], tmp_path: Path
) -> None:
    model, _ = traced
    dump = imported("samba.utils.tensorboard_debug").dump_accuracy_debug_info
    for step in range(2):
        samba.session.run(inputs)
        path = dump(tmp_path / "debug", model, step=step)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {row["name"]: row for row in rows if row["step"] == 1}
    weight = by_name["net__first__weight"]
    (device,) = samba.session.get_tensors_by_name(["net__first__weight"])
    assert weight["norm"] == pytest.approx(float(device.norm()))
    assert weight["largest_difference_to_host"] == pytest.approx(
        float((device.torch() - model.first.weight.detach()).abs().max())
    )
    assert weight["largest_difference_to_host"] > 0
    assert {row["kind"] for row in rows} == {"parameter", "gradient", "optimizer_state"}
    assert len(rows) == 2 * 3 * 4


@exercises("samba.env.use_mock_samba_runtime")
def test_numbers_are_computed_and_not_mocked() -> None:
    assert imported("samba.env").use_mock_samba_runtime() is False


@exercises("samba.test.TestWithGold")
def test_the_device_is_held_to_a_gold_file(
    samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any], tmp_path: Path
) -> None:
    model, _ = traced
    test_with_gold = imported("samba.test").TestWithGold
    args = imported("samba.utils.argparser").parse_app_args(
        ["test", "--pef", "net", "--gold-file-path", str(tmp_path / "gold.safetensors")]
    )
    gold = test_with_gold(model, inputs).run()
    assert Path(args.gold_file_path).is_file()
    losses, outputs = seeded_net()(*inputs)
    assert [*gold] == [tensor.sn_name for tensor in model.output_tensors]
    assert torch.equal(gold["net__outputs__0"], samba.to_torch(outputs))
    test_with_gold(model, inputs, threshold=0).run()
    samba.session.run(inputs)
    with pytest.raises(AssertionError, match=r"of \d+ elements differ by more than 0\.003"):
        test_with_gold(model, inputs).run()
    written = test_with_gold(model, inputs).write_gold()
    assert not torch.equal(written[str(model.output_tensors[0].sn_name)], samba.to_torch(losses))
    test_with_gold(model, inputs, args.gold_file_path).run()


def test_a_gold_file_of_something_else_is_refused(
    samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    model, _ = traced
    test_with_gold = imported("samba.test").TestWithGold
    file = tmp_path / "gold.safetensors"
    save_file({"other": torch.ones(BATCH)}, file)
    with pytest.raises(WeightsError, match="holds other, and the PEF's outputs are net__"):
        test_with_gold(model, inputs, file).run()
    file.write_text("no tensors")
    with pytest.raises(WeightsError, match="is no safetensors file"):
        test_with_gold(model, inputs, file).run()
    assert test_with_gold(model, inputs).run().keys() == {str(one.sn_name) for one in model.output_tensors}
