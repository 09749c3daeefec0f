"""What the ranks of a job print, side by side, on the streams of one launcher."""

import io
import sys


def print_whole_lines() -> None:
    """What the ranks print is mixed by mpirun as it comes: a line must be one write, whatever PYTHONUNBUFFERED says."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
