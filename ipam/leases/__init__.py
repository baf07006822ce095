"""Addresses that are unique in a whole cluster: blocks of them, leased to nodes by the API server.

`objects` are what the API server keeps, `block_layout` has their names. `lessee` works in one
thread: `claims` leases a block, `confirmation` confirms, `upkeep` gives idle blocks back.
`leased_store` gives addresses out of the blocks, and `sticky` keeps them for pods by name.
docs/developers/protocol.md has the steps, and what follows from a crash at any point.
"""
