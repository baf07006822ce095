"""A real Kubernetes: its control plane on this machine's loopback, its node in the virtual machine.

This folder builds Kubernetes and its dependencies (`programs`) and runs the control plane
(`control_plane`) and the node (`node`). Its tests see podfabric only through the API server and the
node. `make test-cluster` runs them; `make test` does not.
"""
