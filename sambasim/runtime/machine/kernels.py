"""The C and C++ compilers of this machine, the cache of what they build, and the kernel in C of this folder."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from sambasim.errors import MachineError
from sambasim.forks import ran

_FLAGS = (
    *("-std=c99", "-O3", "-march=native", "-fno-fast-math", "-ffp-contract=off", "-fPIC", "-shared"),
    # The kernels are limited by memory, so the widest loads win even if they lower the clock.
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_DIGEST_BYTES = 16
INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@cache
def build(name: str, *definitions: str) -> ctypes.CDLL | MachineError:
    """Build and load `name`.c with `definitions`, such as "REAL=float", once per process, or load an earlier build.
    Returns the error if neither is possible."""
    source = Path(__file__).with_name(f"{name}.c")
    flags = [*_FLAGS, *(f"-D{definition}" for definition in definitions)]
    key = _digest("\n".join([source.read_text(encoding="utf-8"), *flags]).encode()).hex()
    folder = cache_folder("kernels")
    kept = None if folder is None else folder / f"{name}-{key}.so"
    with suppress(OSError):  # e.g. a noexec mount, or another C library
        if kept is not None and _is_whole(kept):
            return ctypes.CDLL(str(kept))
    try:
        with tempfile.TemporaryDirectory() as scratch:  # a loaded library may be deleted
            built = _compile(source, flags, Path(scratch) / f"{name}.so")
            is_kept = kept is not None and _keep(built, kept)
            return ctypes.CDLL(str(kept if is_kept else built))
    except MachineError as error:
        return error
    except OSError as error:
        return MachineError(f"a kernel cannot be built and loaded: {error}", remedy="set TMPDIR")


def find_c_compiler() -> list[str]:
    """The command of the C compiler: CC, else cc, else gcc. Raises MachineError if there is none."""
    if named := shlex.split(os.environ.get("CC", "")):
        if shutil.which(named[0]) is None:
            raise MachineError(f"CC names {named[0]}, which does not exist", remedy="unset CC")
        return named
    if compiler := next(filter(shutil.which, ("cc", "gcc")), None):
        return [compiler]
    raise MachineError("there is no C compiler", remedy="install gcc, or set CC to your C compiler")


def find_cpp_compiler() -> str:
    """The C++ compiler that inductor will call, by path. Raises MachineError if there is none."""
    name = os.environ.get("CXX") or "g++"
    if path := shutil.which(name):
        return path
    why, remedy = f"CXX names {name}, which does not exist", "unset CXX"
    if shutil.which("g++") is None:
        why = f"there is no {name} in PATH"
        remedy = "install one, on Debian and Ubuntu: apt install g++; on Fedora: dnf install gcc-c++"
    raise MachineError(f"--engine inductor needs a C++ compiler, and {why}", remedy=remedy)


def _compile(source: Path, flags: list[str], path: Path) -> Path:
    command = [*find_c_compiler(), *flags, "-o", str(path), str(source)]
    printed, last = ran(*command)
    if printed is None:
        raise MachineError(f"{command[0]} cannot build {source.name}: {last}", remedy="set CC to gcc")
    return path


def _keep(built: Path, kept: Path) -> bool:
    """Copy `built` to `kept`; returns whether a whole copy is there. If several ranks build at the same time, the first
    copy stays: a file that another process has mapped must not be replaced."""
    content = built.read_bytes()
    try:
        if kept.exists() and not _is_whole(kept):
            kept.unlink()
        with tempfile.NamedTemporaryFile(dir=kept.parent) as copy:
            copy.write(content + _digest(content))
            copy.flush()
            with suppress(FileExistsError):
                os.link(copy.name, kept)
    except OSError:
        return False
    return _is_whole(kept)


def _is_whole(path: Path) -> bool:
    """Whether `path` is a library and its digest, which the loader ignores. It would crash on a truncated library."""
    with suppress(OSError):
        content = path.read_bytes()
        return _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]
    return False


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def cache_folder(name: str) -> Path | None:
    """The user's cache folder for code compiled for this CPU model; None if it cannot be created."""
    described = _cpuinfo("model name", "flags", "Features", "CPU part")
    cpu = _digest("\n".join([torch.backends.cpu.get_cpu_capability(), *described]).encode()).hex()
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "sambasim" / name / cpu
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None
    return folder


def use_inductor_cache() -> None:
    """Let inductor store compiled code in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another one."""
    if not os.environ.get(INDUCTOR_CACHE_VARIABLE):
        folder = cache_folder("inductor")
        if folder is not None and os.access(folder, os.W_OK):
            os.environ[INDUCTOR_CACHE_VARIABLE] = str(folder)


def _cpuinfo(*starts: str) -> list[str]:
    """The lines about the first core that start with one of these."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return sorted(line for line in lines if line.startswith(starts))


@cache
def cpu_kind() -> str:
    """By which torch, oneDNN and MKL choose kernels, whose bits differ: `x86_64 AVX512 GenuineIntel AMX`."""
    has = {"BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    vendor = [line.partition(":")[2].strip() for line in _cpuinfo("vendor_id", "CPU implementer")]
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *vendor, *filter(has.get, has)])
