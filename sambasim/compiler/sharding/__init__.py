"""Cuts the tensors of a program over the ranks of a mesh axis: layouts, their propagation, a rule for each operator."""
