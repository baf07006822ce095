"""What a container runtime talks to: the CNI protocol and the plugins that speak it."""
