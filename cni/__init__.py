"""The CNI plugins that a container runtime calls, their protocol and their launcher."""
