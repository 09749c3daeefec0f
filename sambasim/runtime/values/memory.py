"""Device memory, and the weights in it: files with the names of the `state_dict`, digests, parts of tensors."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sambasim.errors import InternalError, MachineError, OptionError, WeightsError
from sambasim.files import TwiceError, in_memory, once, regular, replacing
from sambasim.ir.dataflow import is_clipped
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, Cut, Slice, Symbol, SymbolKind, TensorType, cut, cut_at
from sambasim.options.fields import SAVE_SUFFIX
from sambasim.pef.archive import bytes_of
from sambasim.runtime.machine.node_memory import ByteArray, Range, collapsing, freeing, populate, private_storage
from sambasim.units import first_of

Tensors: TypeAlias = Mapping[str, Tensor]
TensorOf: TypeAlias = Callable[[str], Tensor]

_SAVED = (SymbolKind.PARAMETER, SymbolKind.BUFFER)
STATE = (*_SAVED, SymbolKind.OPTIMIZER_STATE)
_WRAPPERS = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


def state_dict(program: Program, tensor_of: Callable[[str], Tensor]) -> Tensors:
    """Copies of parameters and buffers, by their names in the module's `state_dict`."""
    saved = [symbol for symbol in program.symbols.values() if symbol.kind in _SAVED and symbol.torch_names]
    tensors = ((symbol, tensor_of(symbol.name)) for symbol in saved)
    return {name: tensor.clone() for symbol, tensor in tensors for name in symbol.torch_names}


def write_tensors(path: Path, tensors: Tensors, what: str, remedy: str) -> None:
    """Write a safetensors file atomically, and its folders. Raises OptionError or, for a full disk, MachineError."""
    try:
        with replacing(path) as hidden:
            save_tensors(hidden, tensors)
    except OSError as error:
        failure = f"{what} cannot be written to {path}"
        if error.errno == errno.ENOSPC:
            raise MachineError(failure, where=str(error), remedy="free disk space, or name another place") from error
        raise OptionError(failure, where=str(error), remedy=remedy) from error


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Raises OSError."""
    path.touch()  # gives it the permissions of the user's other files; safetensors' own are for the owner alone
    permissions = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        # safetensors has one class for all: "Error while serializing: I/O error: No space left … (os error 28)"
        number = re.search(r"\(os error ([0-9]+)\)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from error
    path.chmod(permissions)


def read_tensors(path: Path, remedy: str) -> Tensors:
    """The content of a safetensors file. Raises WeightsError for any other."""
    try:
        with in_memory(path), open(path, "rb", opener=regular) as file:
            tensors = load_file(path)
            header = file.read(int.from_bytes(file.read(8), "little"))  # of a length that is right
            json.loads(header, object_pairs_hook=once)
            return tensors
    except (OSError, SafetensorError, TwiceError) as error:
        raise WeightsError(f"{path} is no safetensors file: {error}", remedy=remedy) from error


def read_saved(path: Path, remedy: str) -> object:
    """The content of a safetensors file, or of one of torch.save: tensors, numbers and texts alone. Raises WeightsError
    for any other."""
    if path.suffix == SAVE_SUFFIX:
        return read_tensors(path, remedy)
    try:
        with in_memory(path):
            return torch.load(path, "cpu", weights_only=True)
    except MachineError:
        raise
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}", remedy="check its permissions") from error
    except Exception as error:  # torch has no class of its own for what a damaged file brings about
        what = f"{path} is no file of torch.save with tensors, numbers and texts alone, or is damaged"
        raise WeightsError(what, remedy=remedy) from error


def fitting(tensors: Tensors, program: Program, source: str, *, strict: bool = True) -> tuple[Tensors, list[str]]:
    """The parameters and buffers of `program`, by symbol, from `tensors` by the names of a state_dict; of tied names,
    one is enough; and notices of what is otherwise there. Raises WeightsError, which names their `source`, if unfit; if
    not `strict`, where nothing fits."""

    def misfit(why: str) -> WeightsError:
        what = f"{source} do not fit the PEF {program.name}: {why}"
        remedy = "use the weights of a run of this model"
        return WeightsError(what, remedy=remedy + (", or take what fits: --no-strict" if strict else ""))

    wanted = [symbol for symbol in program.symbols.values() if symbol.kind in _SAVED and symbol.torch_names]
    names, notices = {name for symbol in wanted for name in symbol.torch_names}, list[str]()
    for prefix in _WRAPPERS * 2:  # each may be within the other
        if all(name.startswith(prefix) for name in tensors) and not any(name.startswith(prefix) for name in names):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
            notices.append(f"{source}: names are taken without {prefix!r}, which a wrapper of the model adds")
    loaded, missing, other = dict[str, Tensor](), list[str](), list[str]()
    for symbol in wanted:
        first, *tied = [name for name in symbol.torch_names if name in tensors] or [""]
        for name in tied:
            if tensors[name] is not tensors[first] and bytes_of(tensors[name]) != bytes_of(tensors[first]):
                raise misfit(f"{first} and {name} are one tensor of the model, and differ there")
        if not first:
            missing.append(symbol.torch_names[0])
        elif (type_ := type_of(tensors[first])) == symbol.whole:
            loaded[symbol.name] = tensors[first]
        else:
            other.append(f"{symbol.torch_names[0]} is {type_} and not {symbol.whole}")
    unknown = [name for name in tensors if name not in names]
    lists = f"missing {first_of(missing) or 'nothing'}; not in the model {first_of(unknown) or 'nothing'}"
    why = "; ".join([lists] * bool(missing or unknown) + [first_of(other)] * bool(other))
    if why and (strict or not loaded):
        raise misfit(why)
    if why:
        kept = "the PEF's stay there" if missing or other else "all else is taken"
        notices.append(f"{source} fit in {len(loaded)} of {len(wanted)} tensors: {why}; {kept}")
    return loaded, notices


def type_of(tensor: Tensor) -> TensorType:
    return TensorType(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class State(NamedTuple):
    """What a run has trained: digests of the parameters and of the whole state; and copies of parameters and buffers,
    by their names in the module's `state_dict`, if they are wanted; also with averages in place of parameters, if the
    program keeps them."""

    weights_sha256: str
    state_sha256: str
    tensors: Tensors
    averages: Tensors


def state_of(
    program: Program,
    tensor_of: Callable[[str], Tensor],
    steps: int,
    kinds: Collection[SymbolKind] = STATE,
    *,
    keeps_tensors: bool = False,
    averages: Mapping[str, str] | None = None,
) -> State:
    """The state after `steps` optimizer steps: symbols of `kinds`, in name order. Calls `tensor_of` once for each.
    `averages`: by parameter, the state that is its average; None if the program keeps none."""
    weights, state, kept, at = hashlib.sha256(), hashlib.sha256(), {}, averages or {}
    for name, symbol in sorted(program.symbols.items()):
        if symbol.kind in kinds:
            tensor = tensor_of(name)
            state.update(bytes_of(tensor))
            if symbol.kind is SymbolKind.PARAMETER:
                weights.update(bytes_of(tensor))
            if keeps_tensors and (symbol.kind in _SAVED or name in at.values()):
                kept[name] = tensor
    state.update(steps.to_bytes(8, "little"))
    averaged: Tensors = {}
    if keeps_tensors and averages is not None:
        symbols = program.symbols
        averaged = state_dict(program, lambda n: kept[at.get(n, n)].to(getattr(torch, symbols[n].type.dtype)))
    tensors = state_dict(program, kept.pop) if keeps_tensors else {}
    return State(weights.hexdigest(), state.hexdigest(), tensors, averaged)


def tensor_sha256(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def part(whole: Tensor, cut: Cut, position: int) -> Tensor:
    """The part of the rank at `position` along the axis of `cut`: a view, unless the dimension is several tensors."""
    shape, dim = whole.shape, cut.dim
    parts = whole.reshape(*shape[:dim], cut.outer, cut.parts, -1, *shape[dim + 1 :]).select(dim + 1, position)
    return parts.flatten(dim, dim + 1)


def joined(parts: Sequence[Tensor], cuts: Sequence[Cut]) -> Tensor:
    """The whole tensor, from its parts in the order of ranks; the first of them if it is not cut."""
    if not cuts:
        return parts[0]
    cut, shape, dim = cuts[0], parts[0].shape, cuts[0].dim
    outer = [part.reshape(*shape[:dim], cut.outer, -1, *shape[dim + 1 :]) for part in parts]
    return torch.stack(outer, dim + 1).flatten(dim, dim + 2)


def part_of(whole: Tensor, cuts: Sequence[Cut], at: Mapping[str, int]) -> Tensor:
    """The part that a rank with the coordinates `at` holds of a tensor."""
    for axis_cut in cuts:
        whole = part(whole, axis_cut, at[axis_cut.axis])
    return whole


SHARED_KINDS = (SymbolKind.PARAMETER, SymbolKind.CONSTANT)


def byte_array(tensor: Tensor) -> ByteArray:
    """The elements in the order of rows: a view, or a copy of a tensor that is not contiguous."""
    array: ByteArray = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    return array


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common. Not its address: who asks for that may write to it, for torch, and
    memory that is copied when one of two changes it would be."""
    return int(tensor.untyped_storage()._cdata)


class DeviceMemory:
    """Typed views of the device memory of one rank; none copies. `shared`, if given, holds parameters and constants at
    the same offsets: the storage of another replica of the node."""

    def __init__(self, program: Program, storage: ByteArray, shared: ByteArray | None = None) -> None:
        self.program = program
        self._bytes = torch.from_numpy(storage)
        self._shared = self._bytes if shared is None else torch.from_numpy(shared)
        self._views: dict[str, Tensor] = {}
        self._regions: dict[tuple[str, str], Tensor] = {}

    @classmethod
    def private(cls, program: Program) -> "DeviceMemory":
        return cls(program, private_storage(program.device_bytes))

    def tensor(self, symbol_name: str) -> Tensor:
        view = self._views.get(symbol_name)
        if view is None:
            symbol = self.program.symbols[symbol_name]
            if symbol.offset is None:
                raise InternalError(f"{symbol_name} is not kept in device memory")
            place = self._shared if symbol.kind in SHARED_KINDS else self._bytes
            view = self._views[symbol_name] = _view(place, symbol.offset, symbol.type)
        return view

    def take(self, tensors: Tensors) -> None:
        """Have these tensors, by symbol, in place of its own."""
        self._views |= tensors

    def of_graph(self, program: Program, weights: Tensors) -> TensorOf:
        """The tensors of a further graph of the PEF, by symbol: this memory, and its own inputs and constants, which
        `weights` have."""
        own: dict[str, Tensor] = {}
        for name in program.names_of(SymbolKind.INPUT, SymbolKind.CONSTANT):
            type_ = program.symbols[name].type
            own[name] = torch.zeros(type_.shape, dtype=getattr(torch, type_.dtype))
            if name in weights:
                own[name].copy_(weights[name])
        return lambda name: own[name] if name in own else self.tensor(name)

    def region(self, group: ParameterGroup, region: str) -> Tensor:
        """A flat tensor of `group`, in place. `region`: "parameter", "gradient" or a state of its optimizer."""
        view = self._regions.get((group.name, region))
        if view is None:
            place = self._shared if region == "parameter" else self._bytes
            view = _view(place, group.regions[region], group.region_type(region))
            self._regions[group.name, region] = view
        return view

    def releasing(self, group: ParameterGroup, region: str, keep: Slice) -> Callable[[], None]:
        """A function that frees the memory of `region` outside the slice `keep`; it is zeros when used again."""
        flat, (start, stop) = self.region(group, region), keep
        return freeing([byte_array(flat[:start]), byte_array(flat[stop:])])

    def populate(self, symbols: Iterable[Symbol]) -> None:
        """Allocate the memory of `symbols`, of which none is that of another rank."""
        placed = [
            (symbol.offset, symbol.offset + symbol.type.size_bytes) for symbol in symbols if symbol.offset is not None
        ]
        populate(self._bytes.numpy(), placed)

    def collapsing(self, ranges: Iterable[Range]) -> Callable[[], None]:
        """Begins to collapse these bytes, of shared memory, into huge pages; returns what ends it."""
        return collapsing(self._bytes.numpy(), ranges)

    @property
    def has_own_parameters(self) -> bool:
        return self._shared.data_ptr() == self._bytes.data_ptr()

    def with_parameters_of(self, other: "DeviceMemory") -> "DeviceMemory":
        """The same memory, with the parameters and constants of `other`."""
        return DeviceMemory(self.program, self._bytes.numpy(), other._shared.numpy())


def _view(place: Tensor, offset: int, type_: TensorType) -> Tensor:
    stop = offset + type_.numel * DTYPE_BYTES[type_.dtype]
    flat: Tensor = place[offset:stop].view(getattr(torch, type_.dtype))
    return flat.view(type_.shape)


def place_inputs(memory: DeviceMemory, batch: Tensors) -> None:
    for name, tensor in batch.items():
        memory.tensor(name).copy_(tensor)


_EMPTY: Mapping[str, Any] = MappingProxyType({})


def place_weights(
    memory: DeviceMemory, weights: Tensors, at: Mapping[str, int] = _EMPTY, keep: Mapping[str, Slice] = _EMPTY
) -> None:
    """Copy weights into device memory, of what is cut the part of the rank with the coordinates `at`. What another
    replica or rank of a pipeline holds is skipped. Of each group in `keep`, only that slice is kept."""
    group_of = {member.parameter: group for group in memory.program.groups for member in group.members}
    skipped = () if memory.has_own_parameters else SHARED_KINDS
    placed = [
        symbol for name, symbol in memory.program.symbols.items() if name in weights and symbol.kind not in skipped
    ]
    if not keep:
        memory.populate(placed)
    for symbol in placed:
        memory.tensor(symbol.name).copy_(part_of(weights[symbol.name], symbol.cuts, at))
        group = group_of.get(symbol.name)
        if group is not None and group.name in keep:
            memory.releasing(group, "parameter", keep[group.name])()


def slices_of(program: Program, ranks: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, its slices for so many ranks. Where gradients are clipped, slices cut no block of the norm."""
    if is_clipped(program):
        slices = cut_at([(group.block_starts, group.numel) for group in program.groups], ranks)
        return {group.name: of_ranks for group, of_ranks in zip(program.groups, slices, strict=True)}
    return {group.name: cut(group.numel, ranks) for group in program.groups}
