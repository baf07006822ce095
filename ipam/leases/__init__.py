"""Addresses that are unique in a whole cluster: blocks of them, leased to nodes by the API server.

`objects` are what the API server keeps, `block_layout` has their names. `lessee` leases, confirms
and returns blocks, in one thread. docs/developers/protocol.md has the steps and the effects of a
crash.
"""
