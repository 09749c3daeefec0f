"""The predicted cost of a section on a device: `compiler` cuts by it, `simulation` adds it up.

work   the operators of a graph as stages, and the tensors between them
price  what a section transfers and computes, and the seconds that it takes
cut    the cut into sections that takes least
fit    whether what a program keeps fits into memory, and an operator onto the chip
"""
