"""Addresses for pods: ranges, reservations, and the IPAM plugin `podfabric-ipam`.

`config` reads configurations, `ranges` has their addresses, `store` keeps reservations on this
node. `plugin` has the five verbs, `delegation` is for our interface plugins. `leases` and
`controller` let one range serve a whole cluster. `nv_ipam` reads the definitions and pools of
NVIDIA's IPAM. `store_choice` picks a request's store. The package does not touch the kernel.
"""
