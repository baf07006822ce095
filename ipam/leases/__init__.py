"""Addresses that are unique in a whole cluster: nodes lease blocks of addresses at the API server.

`objects` describes the objects on the API server, and `block_layout` their names. `lessee` works in
one thread: `claims` leases blocks, `confirmation` confirms leases, `upkeep` returns idle blocks.
`leased_store` reserves addresses of the blocks, and `sticky` keeps addresses for pods by name.
docs/developers/protocol.md describes the steps, and the effect of a crash at each point.
"""
