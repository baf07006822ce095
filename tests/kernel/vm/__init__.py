"""A virtual machine that runs a command of this checkout under Debian's own kernel.

The guest boots the kernel image of a Debian package that is never installed, with this host's root
file system below a tmpfs overlay, so the checkout, its virtual environment and every tool are just
there and nothing the guest writes lasts. What belongs here: getting the kernel (`debian`),
building the `ibloop` module for it (`module`), the first and second init (`initramfs`,
`guest.sh`), and running it (`qemu`). What does not: anything about what is tested.
"""
