"""For modules of `sambaflow` without names in sambasim; see `finder.ABSENT`."""
