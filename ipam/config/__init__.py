"""The `ipam` object of a network configuration as checked, typed values."""
