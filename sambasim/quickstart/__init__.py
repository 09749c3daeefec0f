"""What `sambasim compile` compiles when it is told nothing: a model, its data and its config."""
