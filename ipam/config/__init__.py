"""Reads the `ipam` object of a network configuration. `options` reads the whole object."""
