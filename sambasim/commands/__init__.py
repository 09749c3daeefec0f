"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

A command is about a `subject`; `question` predicts for it, `plan` and `planner` choose a strategy, `memory`, `devices`,
`report` and `compare` are their commands. `compile` makes a PEF, in a `child` process, and `proof` compares it with its
model: `eager` beside what is `played`, in `steps`, on other `batches`. `run_checks` comes before `run`.
"""
