"""Netlink: interfaces, addresses, VFs and RDMA devices, as the kernel has them."""
