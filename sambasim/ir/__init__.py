"""The program as plain data: graphs, symbols, sections, mesh, and the invariants that they keep. Imports no torch, and
reads no files."""
