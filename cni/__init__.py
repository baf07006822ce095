"""The CNI plugins: the protocol, the plugins and their launcher. A container runtime calls them."""
