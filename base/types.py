"""Types for texts and numbers that are easily confused."""

from typing import NewType

Bdf = NewType("Bdf", str)
"""The name of a device in sysfs: "0000:af:06.0", or "mlx5_core.sf.6" of an auxiliary device."""

DeviceId = NewType("DeviceId", str)
"""The kubelet's name of a device: a PCI address, or "0000:af:06.0-3" or "0" in a shared pool."""

PKey = NewType("PKey", int)  # a partition key of 16 bits; full members have the bit 0x8000

NetnsInode = NewType("NetnsInode", int)
"""The inode of a network namespace. The kernel may reuse the number once the namespace is gone."""

NetnsIdentity = NewType("NetnsIdentity", str)
"""A text that is unique for each network namespace of this boot: "cookie:4711", or "inode:..."."""
