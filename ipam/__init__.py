"""Addresses for pods: ranges, who holds what, and the IPAM plugin `podfabric-ipam`.

From the configuration to the disk: `options` (what a network may say), `ranges`, `allocation` and
`others` (which address is next), `segments` (the link it is for), `store` (owners, reservations),
`sqlite_store` over `store_files`, `tables` and `database` (the store of one node), `plugin` (the
five verbs), `executable` (the verbs as a process, one at a time for an attachment), `delegation`
(how our interface plugins call them), `fsck` (a damaged store). It hands out numbers, and does not
touch the kernel.
"""
