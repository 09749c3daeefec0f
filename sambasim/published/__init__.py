"""Published measurements of steps, and the models that they were made with."""
