"""The door: `import sambaflow` in a script finds sambasim's own.

    way in                                what opens it
    sambasim app SCRIPT.py run ...        the folder `on_path` goes behind the script's own folder on `sys.path`
    python -m sambasim SCRIPT.py ...      the same
    eval "$(sambasim env)"                the folder goes in front of PYTHONPATH, for plain `python SCRIPT.py run ...`

The folder holds a package named `sambaflow` that Python finds when a script imports it. All that it does is to `enter`,
and then it is gone: the finder stands in `sys.meta_path` and answers for `sambaflow` and everything below, each a
`Facade` of the module of ours that `table.py` names. So in every way in it is the first import that opens the door;
a script that does not import `sambaflow` is run as Python runs it, and a process without the folder on its path has no
`sambaflow` at all.

A SambaFlow that is really installed is given way to, with a notice on standard error.

A name that is not here raises an error that says which, and what is near it. The error is an ImportError or an
AttributeError as Python would raise, so an app that asks for a thing and lives without it goes on; and it is a
`UserError`, so what nobody catches is told in three lines, without a traceback.

How a script ends, alone or as one rank of a job, is in `ending.py`.
"""

from sambasim.samba.door.entrance import enter

__all__ = ["enter"]
