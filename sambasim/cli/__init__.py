"""The shell commands. Only here do commands print results and set exit codes. `main` has the table of commands, and the
module of each, which it imports at need; `shared` has options of several of them."""
