"""The default input of `sambasim compile`: a model, its data and its config."""
