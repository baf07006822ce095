"""Netlink: the kernel's interfaces, addresses, VFs and RDMA devices."""
