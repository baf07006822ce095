"""Serves the definitions and pools of NVIDIA's nv-ipam without its controller and daemon.

`translate` reads a definition. `pool_import` makes AddressPools from nv-ipam's pools. `importing`
imports the reservations of nv-ipam's daemon.
"""
