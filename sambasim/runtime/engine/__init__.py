"""A program as Python functions, and their execution. Each line imports only from itself and from the lines above:

routes, instructions  which functions operators call; instructions over registers
handlers, lowering    from nodes to instructions; fused instructions of an update
code, pass_code       instructions as one generated function; gradients that kernels write in place
units, inductor       sections that torch's inductor compiles
spans, executor       passes
update                updates, and the end of a step
"""
