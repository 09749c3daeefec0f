"""What `cli` and `api` both print: streams, tables, phases and errors (`output`), the progress of a run."""
