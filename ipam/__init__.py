"""Addresses for pods: ranges, reservations, and the IPAM plugin `podfabric-ipam`.

`config` reads network configurations. `store` keeps this node's reservations. `leases` and
`controller` share one range among all nodes of a cluster. `nv_ipam` reads the definitions and pools
of NVIDIA's IPAM plugin. `plugin` implements the CNI verbs, and `delegation` calls IPAM plugins.
"""
