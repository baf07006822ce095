"""Serves the definitions and pools of NVIDIA's IPAM plugin, nv-ipam, without its daemon."""
