"""Compares the use of each GPU with the limits of the groups."""
