"""Follows the pools of NVIDIA's nv-ipam on the API server, whose controller cuts them.

`objects` are its pools, `follower` keeps what this node may use of them in a file (`ipam.nv_ipam`),
and `shares` sees that no two nodes use one address while the controller moves entries.
"""
