"""The `ipam` object of a network configuration, checked, as typed values."""
