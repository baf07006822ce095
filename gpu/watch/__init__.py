"""Compares what processes use of each GPU with the limits of their groups."""
