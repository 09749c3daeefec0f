"""What a command does, for the shell and for Python alike: no click here, and nothing is printed."""
