"""A program as Python functions, and their execution. Files import only from their own line and those above:

instructions, handlers  what executes each node: instructions over registers
code                    instructions as one generated function
pass_code               the same for a pass: its kernels write gradients directly into device memory
inductor                sections that torch's inductor compiles
executor                runs passes
update                  runs the update, and ends a step
"""
