"""How ranks exchange data: each transport carries out a program's communication nodes. By line, from low to high:

communication, shared_flags  interfaces; counters by which the ranks of a node wait
in_process, messages         between ranks of one process; between processes
exchange, host               sync through the host: MPI, gloo, parameter servers
links, network, window        device sync: TCP between nodes, its messages, and within a node
connect                      opens the ranks of a process, with device memory and transports
"""
