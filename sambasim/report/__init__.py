"""Everything that is printed or written for people.

`tables` (terminal, HTML, CSV, JSON) and `svg` are what all outputs are made of. `steps`, `trace`, `analysis` (of one
replica: sections, stages, headline, roofs), `folds` and `advice` say what there is to say of a prediction. A command
has a file of its name: `simulation`, `inspect` with `inspect_tables`, `plan`, `memory`, `devices`, `validation`,
`sambatune`; `summaries` is for compile, run and bench. `compare` and `page` (the page of `report`) stand above.
"""
