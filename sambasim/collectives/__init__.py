"""Communication schedules as data: executed by the runtime, priced by the simulation."""
