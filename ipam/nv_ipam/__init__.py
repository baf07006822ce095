"""NVIDIA's IPAM: its definitions and its pools, without its controller and daemon."""
