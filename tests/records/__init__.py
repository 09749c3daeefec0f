"""Tests of the room `runtime`."""
