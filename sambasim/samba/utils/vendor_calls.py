"""Functions of `samba.utils` that only the vendor's machine or compiler needs. They print a notice."""

from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once


def fix_rdu_affinity(*arguments: object, **options: object) -> None:
    """No effect."""
    say_once("utils.fix_rdu_affinity", "mpirun and --threads place ranks on cores", app_line())


def create_mac_resource_report(*arguments: object, **options: object) -> None:
    """No effect."""
    say_once("utils.create_mac_resource_report", "sambasim report --tables shows the units of each section", app_line())
