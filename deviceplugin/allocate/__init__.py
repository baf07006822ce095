"""Chooses device ids for a container, and the device nodes and variables that it gets."""
