"""A program as Python functions, and their execution. Each line imports only from itself and from the lines above:

instructions, handlers  what executes each node: instructions over registers
code, pass_code         instructions as one generated function; gradients that kernels write in place
inductor                sections that torch's inductor compiles
executor, update        passes; updates, and the end of a step
"""
