"""The training step and the evaluation of a model as functional graphs.

step       one callable of model and loss
state      calls it and records what it changes, and by which values of tensors Python decides (`recording`, `snapshot`,
           `slots`, `asked_values`); `recording` also finds the user's lines
explain    what cannot be captured, in words
trace      captures the callable as a functional graph
as_eager   makes a trace record the operators that eager PyTorch runs
tensors    the model's tensors, and which constants are refused
trial      undoes what a call changes, and notes what it does outside of Python
"""
