"""Pools: what configuration says, in three forms, and which HCAs are in which pool.

`pool_config` has the keys and defaults, `formats` and `flags` read the files and flags of other
device plugins. `pool` assigns HCAs to pools.
"""
