"""The training step and the evaluation of a model as functional graphs. `step` makes one callable of model and loss,
`state` calls it and sees what it changes and asks (`recording`, `snapshot`, `slots`, `asked_values`), `explain` says
what cannot be captured, `told` notes what a call does outside of Python, and `trace` captures. `as_eager`, `tensors`,
`trial` and `names` are what these need of torch and of the model."""
