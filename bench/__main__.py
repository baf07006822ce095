"""Print every table."""

from bench import attach, devices

if __name__ == "__main__":
    attach.measure()
    devices.measure()
