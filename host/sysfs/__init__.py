"""sysfs and /proc: PCI functions, HCAs, GPUs, and how far they are from each other."""
