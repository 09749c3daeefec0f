"""How sections are executed: what makes the plain engine quick, and the engine that compiles them by inductor."""
