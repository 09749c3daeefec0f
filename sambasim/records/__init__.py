"""The schemas of the files that a run writes, and their readers. `runtime` writes them, `report` reads them."""
