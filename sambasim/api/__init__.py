"""The Python API, whose `names` `import sambasim` gives. Importing this package alone imports no torch.

`pef` compiles, from what `given` makes of a script's tensors, loss and optimizer; `jobs` trains and predicts; `ranks`
has the ranks of the script, one or those of mpirun, and words errors for Python.
"""
