"""A module of `sambaflow` that has none of its names here; `door.table.ABSENT` says what to do instead."""
