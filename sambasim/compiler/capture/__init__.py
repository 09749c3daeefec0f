"""The training step and the evaluation of a model as functional graphs.

step       one callable of model and loss
state      calls it and records what it changes, and which values Python decides by (`recording`, `snapshot`, `slots`,
           `asked_values`); `recording` also finds the user's lines
explain    what cannot be captured, in words
trace      captures
as_eager   the operators of eager PyTorch
tensors    the model's tensors, and which constants are refused
trial      undoes what a call changes, and notes what it does outside of Python
"""
