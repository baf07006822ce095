"""What every layer may use and nothing of which knows a network: files, paths, locks, documents.

`paths` says where the node's files are, `files` writes them so that they survive a kill, `confined`
opens those that a tenant names, `documents` reads what an administrator writes, `watching` tells
when it changes. `locks` and `interrupts` are how calls wait for each other and are ended. `memory`
and `msgspec_warmup` are for processes that serve for months. `types` has names for texts and
numbers that are easily mistaken. Code that touches the kernel's network or RDMA devices belongs in
`host`.
"""
