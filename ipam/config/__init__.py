"""The `ipam` object of a network configuration as checked, typed values.

`options` reads the object, `range_reader` one range, `requested_ips` the addresses that a pod asks
for.
"""
