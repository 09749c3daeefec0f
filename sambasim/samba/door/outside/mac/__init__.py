"""`sambaflow.mac`: the compiler's side of SambaFlow, of which apps import `metadata`."""
