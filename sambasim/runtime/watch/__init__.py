"""Observers of a step; status files, and the supervisor and watchdog that end a job which stalls."""
