"""NVIDIA's IPAM: its definitions and its pools as they are, without its controller and daemon."""
