"""Communication schedules as data: what the runtime carries out, and the simulation prices."""
