"""NVIDIA's IPAM: its definitions and its pools, without its controller and daemon.

`translate` reads a definition, `pool_import` makes AddressPools of its pools, `importing` takes
over the reservations of its daemon.
"""
