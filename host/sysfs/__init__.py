"""sysfs and /proc: PCI functions, HCAs, GPUs, and the distances between them."""
