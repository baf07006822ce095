"""A virtual machine that runs a command of this checkout under Debian's own kernel.

The guest boots the kernel image of a Debian package that is never installed. This host's root file
system is below a tmpfs overlay, so the checkout, its virtual environment and every tool are there,
and the guest's writes are lost. This folder gets the kernel (`debian`), builds the `ibloop` module
for it (`module`), has the first and second init (`initramfs`, `guest.sh`), and runs the guest
(`qemu`). Nothing here depends on the tests.
"""
