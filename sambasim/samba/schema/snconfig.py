"""`SNConfig`: settings of an app under names."""

from argparse import Namespace

__all__ = ["SNConfig"]


class SNConfig(Namespace):
    """Settings from keywords: `SNConfig(batch_size=32, pef_name="net")`. Each is an attribute, and can be set anew; two
    with the same settings are equal. Any names may be given, and nothing is checked here.

    `samba.session.setup` takes one, and so does `config_dict=` by `vars(config)`: there the names of flags count.
    """
