"""The node: the only code that touches the kernel, and where the node's files are.

`netlink` is the socket. `links`, `namespaces`, `addresses`, `announce` act through it and others,
`placement` puts an interface into a pod and back with them; `vfs` is what a PF shows and sets of
its VFs, `rdma` moves RDMA devices. `sysfs` reads attributes, directories and links; `infiniband`
and `pci` know what they mean (`pci` binds drivers, too); `hcas` is all of that for the device
plugin, `glance` whether it changed, `topology` how far devices are apart, `gpus` who else is
there, `events` that something changed. `paths`, `files`, `documents` and `watching` say where
things are, how they are written, read, and seen to change; `decoders` is for processes with
threads. Nothing here knows CNI, Kubernetes or the other packages.
"""
