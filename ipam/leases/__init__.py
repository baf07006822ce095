"""Addresses that are unique in a whole cluster. Nodes lease blocks of addresses at the API server.

`objects` describes the objects on the API server. `block_layout` divides pools into blocks.
`lessee` works in one thread. `claims` leases blocks, `confirmation` confirms leases, and `upkeep`
returns idle blocks. `leased_store` reserves addresses of the blocks. `sticky` reserves addresses
for pods by name. docs/developers/protocol.md describes the steps of a lease, and the effect of a
crash after each step.
"""
