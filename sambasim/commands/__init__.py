"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

question                       what is asked, about which PEF or config
compile, child, proof          makes a PEF in a child process, then compares it with its model
plan, variants                 checks and prices strategies
memory, devices, results, run  the commands of these names
outputs, torch_optimizers      files that commands write; optimizers of a script
"""
