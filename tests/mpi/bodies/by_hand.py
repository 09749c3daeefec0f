"""One rank of the program by hand: prints, on rank 0, the outputs of all ranks as hexadecimal bytes."""

import json
import sys

from sambasim.runtime.communicator import connect
from sambasim.runtime.executor import Executor
from sambasim.runtime.replica import place_inputs
from sambasim.runtime.transports.factory import Way, allocate
from sambasim.runtime.transports.factory import connect as transports_of
from tests.support.by_hand import operand, program, seed

communicator = connect(sys.argv)
by_hand = program()
allocated = allocate(by_hand, communicator, Way.HOST)
(transport,) = transports_of(by_hand, communicator, Way.HOST, allocated)
memory = allocated.memories[0]
executor = Executor(by_hand.evaluation, by_hand, memory.tensor, transport=transport)
place_inputs(memory, {"x": operand(communicator.rank)})
for _ in range(2):
    seed(communicator.rank)
    outputs = {name: tensor.numpy().tobytes().hex() for name, tensor in executor.run().items()}
everybody = communicator.gather_object(outputs)
if everybody is not None:
    print(json.dumps(everybody))
