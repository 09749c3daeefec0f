"""`samba.utils` and what lies beside it: data, reports, checkpoints, gold files, seeds, weight norms, closeness."""

import gzip
import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sambasim import samba
from sambasim.errors import DataError, ModelError, OptionError, UserError, WeightsError
from sambasim.samba import utils
from sambasim.samba.utils.common import seed_from_environment
from tests.samba.harness import BATCH, Made, Net, imported, refused, same_weights, seeded

pytestmark = pytest.mark.usefixtures("app")


def test_images_become_normalised_features() -> None:
    transform_for = imported("samba.utils.dataset.mnist").dataset_transform
    image = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    flat = transform_for({"num_features": 12})(image)
    gold = (torch.from_numpy(image) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(flat, gold.flatten())
    assert torch.equal(transform_for(Namespace(num_features=12))(image), flat)
    kept = transform_for({"num_features": None})
    for given in (image, image[..., None], torch.from_numpy(image), torch.from_numpy(image)[None]):
        torch.testing.assert_close(kept(given), gold[None])
    torch.testing.assert_close(kept(torch.from_numpy(image) / 255), gold[None])
    with pytest.raises(DataError, match="an image has 12 pixels, and num_features is 784"):
        transform_for({"num_features": 784})(image)
    with pytest.raises(DataError, match=r"has the shape \(3, 4, 3\), and images like MNIST's have one channel"):
        kept(np.zeros((3, 4, 3)))


def write_mnist(folder: Path, part: str, count: int, *, packed: bool = False) -> tuple[Any, Any]:
    """Images of 3 x 2 pixels and their labels, in idx files."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.arange(count * 6, dtype=np.uint8).reshape(count, 3, 2)
    labels = np.arange(count, dtype=np.uint8) % 10
    for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
    return images, labels


def test_loaders_of_mnist(tmp_path: Path) -> None:
    prepare = imported("samba.utils.dataset.mnist").prepare_dataloader
    raw = tmp_path / "MNIST" / "raw"
    images, labels = write_mnist(raw, "train", 10)
    write_mnist(raw, "t10k", 5, packed=True)
    params = {"data_dir": str(tmp_path), "batch_size": 4, "num_features": 6}
    torch.manual_seed(0)
    train, test = prepare(params)
    batches = list(train)
    assert [tuple(x.shape) for x, _ in batches] == [(4, 6), (4, 6)]
    seen = torch.cat([y for _, y in batches])
    assert seen.dtype is torch.int64
    assert seen.tolist() != sorted(seen.tolist()), "shuffled"
    gold = (torch.from_numpy(images[seen]).flatten(1) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(torch.cat([x for x, _ in batches]), gold)
    ((x, y),) = test
    assert y.tolist() == labels[:4].tolist()
    assert len(x) == 4
    data = torch.utils.data.TensorDataset(torch.arange(8))
    train, test = prepare(Namespace(batch_size=4), data, data)
    assert (len(train), [one.tolist() for (one,) in test]) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_replicas_have_their_shares_of_the_training_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    shares = []
    for rank in (0, 1):
        for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", rank)):
            monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
        train, test = imported("samba.utils.dataset.mnist").prepare_dataloader({"batch_size": 2}, data, data)
        shares.append({int(sample) for (batch,) in train for sample in batch})
        assert len(test) == 4
    assert [len(share) for share in shares] == [4, 4]
    assert shares[0] | shares[1] == set(range(8))


def test_mnist_that_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    prepare = imported("samba.utils.dataset.mnist").prepare_dataloader
    with pytest.raises(DataError, match="it has none of data_dir, data_folder, data_path"):
        prepare({"batch_size": 4})
    with pytest.raises(DataError, match="has no train-images-idx3-ubyte") as caught:
        prepare({"data_path": str(tmp_path)})
    assert "downloads nothing" in (caught.value.remedy or "")
    write_mnist(tmp_path, "train", 2)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"no idx file")
    with pytest.raises(DataError, match="is no idx file of MNIST"):
        prepare({"data_folder": tmp_path})


def test_an_accuracy_report_is_saved(tmp_path: Path) -> None:
    report_of, path = imported("samba.utils.benchmark_acc").AccuracyReport, tmp_path / "report.json"
    report = report_of(
        val_accuracy=torch.tensor(97.5), val_metrics={"acc": torch.tensor(0.5), "loss": 0.25}, batch_size=8
    )
    report.save(path)
    figures = {"val_accuracy": 97.5, "val_metrics": {"acc": 0.5, "loss": 0.25}, "batch_size": 8}
    assert json.loads(path.read_text()) == figures
    assert (report.val_accuracy, report.val_metrics["loss"]) == (97.5, 0.25)
    report.save(None)
    report_of(loss=torch.tensor(torch.nan)).save(path)
    assert json.loads(path.read_text()) == {"loss": "NaN"}, "JSON has no number for it"
    with pytest.raises(AttributeError, match="this report has no loss; it has val_accuracy, val_metrics, batch_size"):
        _ = report.loss
    with pytest.raises(OptionError, match="losses is list"):
        report_of(losses=[1, 2])
    with pytest.raises(OptionError, match=r"cannot be written: No such file"):
        report.save(tmp_path / "no" / "report.json")


def test_a_checkpoint_resumes(inputs: tuple[Any, Any], net: Made, net_pef: str, tmp_path: Path) -> None:
    checkpoint, file = imported("samba.utils.checkpoint"), tmp_path / "after_1.pt"
    model, optimizer = net
    samba.session.run(inputs)
    checkpoint.save_checkpoint(file, model, optimizer, epoch=1)
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"
    samba.session.run(inputs)
    samba.session.to_cpu(model)
    resumed = samba.from_torch_model_(Net())
    optimizer = samba.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    assert checkpoint.load_checkpoint(file, resumed, optimizer) == {"epoch": 1}
    samba.utils.trace_graph(resumed, inputs, optimizer, pef=net_pef)
    samba.session.run(inputs)
    samba.session.to_cpu(resumed)
    assert same_weights(model, resumed)
    with pytest.raises(OptionError, match="the checkpoint cannot be written"):
        checkpoint.save_checkpoint(file / "net.pt", resumed, optimizer)
    torch.save(model.state_dict(), tmp_path / "other.pt")
    for words, path, *given in (
        ("has the state of 1 optimizers, and 0 are given", file, resumed),
        ("is of another model", file, Net(width=16), optimizer),
        ("cannot be read as a checkpoint", tmp_path / "absent.pt", resumed, optimizer),
        ("was not written by save_checkpoint", tmp_path / "other.pt", resumed, optimizer),
    ):
        with pytest.raises(WeightsError, match=words):
            checkpoint.load_checkpoint(path, *given)


def test_tensors_are_saved_as_on_the_device(inputs: tuple[Any, Any], net: Made, tmp_path: Path) -> None:
    model, _ = net
    samba.session.run(inputs)
    saved = samba.utils.checkpoint.save_tensors([model.first.weight, inputs[0]], tmp_path / "some.safetensors")
    (device,) = samba.session.get_tensors_by_name(["net__first__weight"])
    assert torch.equal(saved["net__first__weight"], samba.to_torch(device))
    assert not torch.equal(saved["net__first__weight"], model.first.weight)
    assert torch.equal(load_file(tmp_path / "some.safetensors")["x"], samba.to_torch(inputs[0]))
    with pytest.raises(OptionError, match="a tensor has none"):
        samba.utils.checkpoint.save_tensors([torch.ones(2)])


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    load = imported("samba.utils.checkpoint").load_sharded_checkpoint
    weights = {name: torch.full_like(value, 2.5) for name, value in Net().state_dict().items()}
    first = {name: value for name, value in weights.items() if name.startswith("first")}
    second = {name: value.bfloat16() for name, value in weights.items() if name not in first}

    def loaded(path: Path, **options: Any) -> bool:
        model = samba.from_torch_model_(Net())
        load(model, path, **options)
        return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    with pytest.raises(WeightsError, match=r"second.bias in torch.bfloat16, and in the model it is torch.float32"):
        loaded(tmp_path)
    assert loaded(tmp_path, ignore_dtype_mismatch=True)
    save_file({"other": torch.ones(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(WeightsError, match="has other, which the model does not have"):
        loaded(tmp_path, ignore_dtype_mismatch=True)
    files = {name: f"model-{1 if name in first else 2}.safetensors" for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert loaded(tmp_path, ignore_dtype_mismatch=True)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    assert loaded(tmp_path / "pytorch_model.bin")
    assert not loaded(tmp_path / "model-1.safetensors", strict=False)
    (tmp_path / "damaged.pt").write_text("no weights")
    shapes = r"has first.weight in the shape \(8, 5\), and in the model \(16, 5\)"
    for file, width, words in (
        ("model-1.safetensors", 8, r"has no second\."),
        ("pytorch_model.bin", 16, shapes),
        ("damaged.pt", 8, r"damaged\.pt is no file of torch.save"),
        ("absent", 8, "is no file, and no folder with files of"),
    ):
        with pytest.raises(WeightsError, match=words):
            load(Net(width), tmp_path / file)


def test_figures_of_every_tensor_are_dumped(inputs: tuple[Any, Any], net: Made, tmp_path: Path) -> None:
    model, _ = net
    dump = imported("samba.utils.tensorboard_debug").dump_accuracy_debug_info
    for step in range(2):
        samba.session.run(inputs)
        path = dump(tmp_path / "debug", model, step=step)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {row["name"]: row for row in rows if row["step"] == 1}
    weight = by_name["net__first__weight"]
    (device,) = samba.session.get_tensors_by_name(["net__first__weight"])
    assert weight["norm"] == pytest.approx(float(device.norm()))
    apart = (device.torch() - model.first.weight.detach()).abs().max()
    assert weight["largest_difference_to_host"] == pytest.approx(float(apart))
    assert weight["largest_difference_to_host"] > 0
    assert {row["kind"] for row in rows} == {"parameter", "gradient", "optimizer_state", "input", "output"}
    assert len(rows) == 2 * (3 * 4 + 2 + 2)
    assert by_name["x"]["norm"] == pytest.approx(float(inputs[0].norm()))
    args = Namespace(output_folder=str(tmp_path / "vendor"))
    assert dump(args, model, inputs, model.output_tensors).parent == tmp_path / "vendor" / "accuracy_debug"


def test_the_device_is_held_to_a_gold_file(inputs: tuple[Any, Any], net: Made, tmp_path: Path) -> None:
    model, optimizer = net
    test_with_gold = imported("samba.test").TestWithGold
    file = tmp_path / "gold.safetensors"
    args = Namespace(gold_file_path=str(file), pef="net")
    gold = test_with_gold(args, "net", model, inputs, optimizer).test()
    losses, outputs = seeded(Net)(*inputs)
    assert [*gold] == [tensor.sn_name for tensor in model.output_tensors]
    assert torch.equal(gold["net__outputs__0"], samba.to_torch(outputs))
    kept = load_file(file)
    assert kept.keys() == {"input.x", "input.target", *(f"output.{name}" for name in gold)}
    assert torch.equal(kept["input.x"], samba.to_torch(inputs[0]))
    test_with_gold(args, "net", model, None, optimizer, threshold=0).test()
    samba.session.run(inputs)
    with pytest.raises(AssertionError, match=r"net: net__.*: \d+ of \d+ elements differ by more than 0\.003"):
        test_with_gold(args, "net", model, None, optimizer).test()
    args.gold_file_path = None
    again = test_with_gold(args, "net", model, None, optimizer).test()
    expected, _ = model(*inputs)
    assert torch.equal(again[str(model.output_tensors[0].sn_name)], samba.to_torch(expected))
    assert not torch.equal(samba.to_torch(expected), samba.to_torch(losses))
    misled = test_with_gold(Namespace(gold_file_path=file), "net", model, inputs).test
    save_file({**{name: kept[name] for name in ("input.x", "input.target")}, "output.other": torch.ones(BATCH)}, file)
    with pytest.raises(WeightsError, match="holds other, and the PEF's outputs are net__"):
        misled()
    file.write_text("no tensors")
    with pytest.raises(WeightsError, match="is no safetensors file"):
        misled()


@pytest.mark.parametrize("called", [True, False])
def test_two_runs_from_one_state_are_compared(inputs: tuple[Any, Any], net: Made, called: bool) -> None:
    model, _ = net
    decorator = imported("samba.test").consistency_test
    calls: list[float] = []

    def check(args: Namespace, model: Net, inputs: Any, outputs: Any) -> list[tuple[str, torch.Tensor]]:
        loss, _ = samba.session.run(inputs, outputs)
        (weight,) = samba.session.get_tensors_by_name(["net__first__weight"])
        calls.append(args.drift * len(calls))
        return [("loss", loss), ("weight", weight + calls[-1])]

    decorated = decorator()(check) if called else decorator(check)
    samba.session.run(inputs)  # momentum has begun
    (name, loss), (_, weight) = decorated(Namespace(drift=0.0), model, inputs, model.output_tensors)
    assert (name, len(calls), decorated.__name__) == ("loss", 2, "check")
    (device,) = samba.session.get_tensors_by_name(["net__first__weight"])
    assert torch.equal(samba.to_torch(device), samba.to_torch(weight)), "one step, not two"
    assert loss.mean() < samba.session.run(inputs)[0].mean() * 2
    with pytest.raises(AssertionError, match="weight differs between two runs from the same state"):
        decorated(Namespace(drift=1e-3), model, inputs, model.output_tensors)


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_seed_sets_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    utils.set_seed(256)
    first, again = drawn(), drawn()
    assert all(before != after for before, after in zip(first, again, strict=True))
    utils.set_seed(256)
    assert drawn() == first
    for seed in (-1, "256"):
        with refused(UserError, f"not {seed!r}"):
            utils.set_seed(seed)  # type: ignore[arg-type]  # the mistake
    monkeypatch.setenv("SAMBA_SEED", "256")
    seed_from_environment()
    assert drawn() == first
    monkeypatch.setenv("SAMBA_SEED", "")
    seed_from_environment()
    assert drawn() == again
    for wrong in ("-1", "many"):
        monkeypatch.setenv("SAMBA_SEED", wrong)
        with pytest.raises(OptionError, match=f"SAMBA_SEED is '{wrong}'") as refusal:
            seed_from_environment()
        assert "export SAMBA_SEED=256" in str(refusal.value.remedy)


def test_weight_norm_splits_every_weight_and_keeps_what_is_computed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Conv1d(3, 2, 1))
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def outputs() -> torch.Tensor:
        return torch.Tensor(model[2](model[1](model[0](inputs)).T[None]))

    before = outputs()
    assert utils.weight_norm_(model) is model
    torch.testing.assert_close(outputs(), before)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    unchanged = {"0.bias": (3,), "1.weight": (3,), "1.bias": (3,), "2.bias": (2,)}
    magnitude, direction = (f"parametrizations.weight.original{number}" for number in (0, 1))
    first, last = {magnitude: (3, 1), direction: (3, 4)}, {magnitude: (2, 1, 1), direction: (2, 3, 1)}
    split = {f"{layer}.{name}": shape for layer, parts in ((0, first), (2, last)) for name, shape in parts.items()}
    assert shapes == unchanged | split
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ModelError, match="0 and 1 share one weight"):
        utils.weight_norm_(model)
    assert model[1].weight is model[0].weight
