"""The node: only this package touches the kernel's network, PCI and RDMA devices.

`netlink` changes interfaces, addresses, VFs and RDMA devices, in the namespaces that `namespaces`
opens. `netdev_move` moves an interface into a pod and restores it on the host. `announce` and
`address_probe` send packets about addresses. `sysfs` finds PCI functions, HCAs and GPUs. This
package depends on neither CNI nor Kubernetes.
"""

from base import skip_init

skip_init("pyroute2")  # which takes 0.17 s of CPU and 21 MB; its messages take 0.02 s and 2 MB
