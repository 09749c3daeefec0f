"""Where in the user's own program a node of torch.fx comes from."""

import os
import re
import sys

from torch import fx

from sambasim.compiler.step import is_library_file
from sambasim.ir.graph import SourceLine

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost line of the user's own program that made this node, or None where torch does not know it."""
    frames = [
        match for match in _FRAME.finditer(node.meta.get("stack_trace") or "") if not is_library_file(match["file"])
    ]
    if not frames:
        return None
    last = frames[-1]
    return SourceLine(portable_path(last["file"]), int(last["line"]), last["code"].strip())


def read_by(node: fx.Node) -> str | None:
    """The line of the user's own program that reads what `node` stands for."""
    line = next((line for line in map(source_line, node.users) if line), None)
    return str(line) if line else None


def portable_path(file: str) -> str:
    """A path that does not tell where this machine keeps its files: relative to the folder from which Python imported
    it (the longest such entry of `sys.path`, or the working folder), or else the bare name."""
    folders = [entry for entry in (*sys.path, os.getcwd()) if entry and file.startswith(entry.rstrip("/") + "/")]
    return os.path.relpath(file, max(folders, key=len)) if folders else os.path.basename(file)
