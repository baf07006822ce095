"""Reads and changes the kernel's interfaces, addresses, VFs and RDMA devices over netlink.

`links` reads interfaces, and `link_changes` changes them. `interface_addresses` sets addresses and
routes, `vfs` sets up VFs, and `rdma` moves RDMA devices. `messages` and `sockets` exchange messages
with the kernel.
"""
