"""What a run leaves on the disk so that it can go on: its format is README.md beside this file."""
