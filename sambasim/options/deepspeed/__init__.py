"""DeepSpeed configs: `file` reads one, `reading` makes options of it by its `tables`."""
