"""The training step and the evaluation of a model as functional graphs. `step` and `losses` make one callable of model
and loss, `state` calls it and sees what it changes and asks (`recording`, `snapshot`, `variations`, `asked_values`,
`lost`), `explain` says what cannot be captured, and `trace` captures. `as_eager`, `precision`, `tensors`, `trial` and
`names` are what these need of torch and of the model."""
