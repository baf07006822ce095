"""Pools: reads their configuration in three formats, and assigns HCAs to them.

`pool_config` has the keys and defaults, `formats` and `flags` read the files and flags of other
device plugins. `pool` assigns HCAs to pools.
"""
