"""Everything that is printed or written for people.

`tables` (terminal, HTML, CSV, JSON, charts) is what all outputs are made of; `analysis` (of one replica: sections,
stages, lines, roofs) and `advice` say what there is to say of a prediction. A command has a file of its name:
`simulation`, `inspect`, `plan`, `memory`, `devices` (with validate); `summaries` is for compile, run and bench,
`formats` for traces and SambaTune's files. `compare` and `page` (the page of `report`) stand above.
"""
