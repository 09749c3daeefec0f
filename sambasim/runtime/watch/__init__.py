"""Observers of a step; status files; the watchdog and supervisor, which end a job that stalls or is signalled."""
