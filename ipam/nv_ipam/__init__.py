"""NVIDIA's nv-ipam: its definitions and its pools as they are, without its daemon.

`options` reads a definition, `pools` has what this node may use of a pool, `requests` makes range
sets of both. Its objects on the API server are followed in `ipam.cluster.nv_ipam`.
"""
