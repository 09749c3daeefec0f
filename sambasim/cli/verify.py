"""`sambasim verify`: a PEF checked whole, every byte of it."""

from pathlib import Path

import click

from sambasim.cli import shared


@click.command("verify")
@click.argument("pef", required=False)
@shared.pef_flag
@shared.output_folder
def verify_command(pef: str | None, named: str | None, output_folder: Path) -> None:
    """Check a PEF whole: the rules of the format, and every byte of the weights.

    One rule needs torch, and is checked by each run: that the operators of this torch take what the graph gives them.

    PEF is a path, or a NAME found as OUT/NAME/NAME.pef. The exit code is 0 if nothing is wrong, 3 if a rule is broken.

    \b
    Example:
      sambasim verify out/digits/digits.pef
    """
    from sambasim.cli import shared
    from sambasim.pef import check, locate

    path = locate(shared.one_pef(pef, named), output_folder)
    document = check(path)
    print(f"{path} is whole: it keeps the rules of the PEF format, and every byte is as it was written")
    print(f"  digest          {document.digest}")
    print(f"  weights sha256  {document.weights_sha256}")
