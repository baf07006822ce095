"""Addresses for pods: ranges, reservations, and the IPAM plugin `podfabric-ipam`.

`config` reads network configurations, and `ranges` describes their addresses. `store` keeps this
node's reservations. `plugin` implements the five CNI verbs, and `delegation` calls an IPAM plugin
for our interface plugins. `leases` and `controller` share one range among all nodes of a cluster.
`nv_ipam` reads the definitions and pools of NVIDIA's IPAM plugin. `store_choice` picks the store of
a request. The package does not touch the kernel.
"""
