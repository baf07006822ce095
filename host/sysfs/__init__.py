"""Reads PCI functions, HCAs, GPUs, and the distances between them from sysfs and /proc.

`discovery` finds HCAs, and `selectors` chooses HCAs. `pci` reads functions and their drivers,
`gpus` reads GPUs, and `infiniband` reads ports. `topology` computes distances.
"""
