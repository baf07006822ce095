"""sysfs and /proc: PCI functions, HCAs, GPUs, and the distances between them.

`discovery` finds HCAs. `pci` reads functions and their drivers, `gpus` the GPUs, and `infiniband`
the ports. `topology` has distances, `selectors` choose HCAs.
"""
