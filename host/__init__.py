"""The node: the only code that touches the kernel, and where the node's files are.

`links`, `namespaces`, `addresses`, `announce` act through netlink and sockets, `placement` puts
an interface into a pod and back with them. `infiniband` reads sysfs; `paths` and `files` say
where things are and how they are written. Nothing here knows CNI, Kubernetes or the other
packages.
"""
