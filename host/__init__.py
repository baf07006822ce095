"""The node: the only code that touches the kernel, and where the node's files are.

`netlink` is the socket. `links`, `namespaces`, `addresses`, `announce` act through it and others,
`placement` puts an interface into a pod and back with them; `vfs` is what a PF shows and sets of
its VFs, `rdma` moves RDMA devices. `infiniband` reads sysfs, as `pci` does, which binds drivers,
too; `paths` and `files` say where things are and how they are written. Nothing here knows CNI,
Kubernetes or the other packages.
"""
