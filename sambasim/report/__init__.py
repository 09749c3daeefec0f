"""Tables, figures, traces."""
