"""Netlink: the kernel's interfaces, addresses, VFs and RDMA devices.

`links` reads interfaces, `link_changes` changes them, `interface_addresses` sets addresses and
routes, `vfs` and `rdma` do the rest. `messages` and `sockets` carry all of it.
"""
