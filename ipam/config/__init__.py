"""Reads the `ipam` object of a network configuration into checked, typed values.

`options` reads the whole object. `range_reader` reads one range. `requested_ips` reads the
addresses that a pod requests.
"""
