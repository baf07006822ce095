"""Every table."""

from bench import attach, cpu, devices

if __name__ == "__main__":
    attach.measure()
    cpu.measure()
    devices.measure()
