"""sysfs and /proc: PCI functions, HCAs, GPUs, and the distances between them.

`discovery` finds HCAs, `pci` functions and their drivers, `gpus` GPUs, `infiniband` ports.
`topology` has distances, `selectors` choose HCAs.
"""
