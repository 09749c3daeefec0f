"""What both surfaces, `cli` and `api`, print: streams, tables, phases and errors (`output`), the progress of a run."""
