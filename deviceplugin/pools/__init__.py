"""Pools: reads their configuration in three formats, and assigns HCAs to them.

`pool_config` has the keys and defaults. `formats` reads our files and the files of other device
plugins, and `flags` reads flags. `pool` assigns HCAs to pools.
"""
