"""How the ranks along an axis of the mesh exchange data: each transport carries out a program's communication nodes."""
