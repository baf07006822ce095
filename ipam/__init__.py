"""Addresses for pods: ranges, who holds what, and the IPAM plugin `podfabric-ipam`.

`config` reads what a network may say, `ranges` are its addresses, and `store` keeps who holds which
on this node. `plugin` has the five verbs, `executable` the verbs as a process, one at a time for an
attachment, `delegation` how our interface plugins call them. `leases` and `controller` make one
range serve a whole cluster; `nv_ipam` reads the definitions and pools of NVIDIA's IPAM.
`store_choice` says which store a request's addresses come from. The package hands out numbers, and
does not touch the kernel.
"""
