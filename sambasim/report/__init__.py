"""What is printed or written for people, but for `demo` and `doctor`, whose tables are in `cli`.

`tables` (terminal, HTML, CSV, JSON, charts) is what all outputs are made of; `analysis` explains a prediction of one
replica, by section, pipeline stage, source line and roofline, and says what would make it quicker. Other files are
named after their command: `simulation`, `inspect`, `plan`, `memory`, `devices` (also validate); `summaries` is for
compile, bench and the mean step of a run, `formats` for traces and SambaTune's files. `compare` and `page` (of
`report`) use all of these.
"""
