"""The commands, the only prints and the only exit codes. `main` has the table of commands, which it imports at need.

`shared` has the options of several; `compile`, `run`, `inspect` (results), `predict` (devices), `app`, `slurm`,
`doctor` and `bench` have the commands.
"""
