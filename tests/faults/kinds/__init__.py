"""The table of bad input, one module for each way in."""
