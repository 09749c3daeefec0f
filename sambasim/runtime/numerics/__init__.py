"""`run --debug-numerics`: where NaN and infinities begin."""
