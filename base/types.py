"""Names for texts and numbers that are easily confused."""

from typing import NewType

Bdf = NewType("Bdf", str)
"""A device as sysfs names it: "0000:af:06.0", or an auxiliary device's "mlx5_core.sf.6"."""

DeviceId = NewType("DeviceId", str)
"""A device as the kubelet names it: a PCI address, "0000:af:06.0-3" or "0" of a shared pool."""

PKey = NewType("PKey", int)  # a partition key, 16 bits; 0x8000 is the bit of a full member

NetnsInode = NewType("NetnsInode", int)
"""The inode of a network namespace. The kernel uses it again once the namespace is gone."""

NetnsIdentity = NewType("NetnsIdentity", str)
"""Unique for each network namespace of this boot: "cookie:4711", or "inode:..."."""
