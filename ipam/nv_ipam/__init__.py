"""NVIDIA's IPAM: its definitions and its pools as they are, without its controller and daemon.

`options` reads a definition, `translate` makes ordinary options of it, `pools` AddressPools of its
objects, and `importing` is the part of the agent.
"""
