"""The node: the only code that touches the kernel's network, PCI and RDMA devices.

`netlink` is the socket and `rtnetlink` has its messages. `links`, `namespaces`, `addresses` and
`announce` act through it, and `netdev_move` uses them to move an interface into a pod and to
restore it on the host. `vfs` reads and sets a PF's settings of its VFs, and `rdma` moves RDMA
devices. `sysfs` reads attributes, directories and links; `infiniband` and `pci` interpret them
(`pci` also binds drivers). `discovery` reads all HCAs for the device plugin, from a
`sysfs_snapshot`; `change_detection` checks cheaply whether they changed. `topology` computes
distances between devices, and `gpus` finds GPUs. Nothing here knows CNI or Kubernetes.
"""
