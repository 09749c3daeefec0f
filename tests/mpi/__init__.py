"""Tests that start MPI jobs."""
