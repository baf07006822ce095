"""A real Kubernetes: its control plane on this machine's loopback, its node in the virtual machine.

What belongs here: building Kubernetes and what it needs (`programs`), the control plane
(`control_plane`), the node (`node`), and the tests that see podfabric only through the API server
and the node. `make test-cluster` runs them; `make test` does not.
"""
