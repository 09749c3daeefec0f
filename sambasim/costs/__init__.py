"""The predicted cost of a section on a device: `compiler` chooses sections by it, `simulation` adds it up to a step.

work   the operators of a graph as stages of a pipeline on the device, and the tensors between them
price  what a section transfers and computes, and the seconds that it takes
cut    the sections that take the least predicted time
fit    whether a program fits into memory, and each operator onto the chip
"""
