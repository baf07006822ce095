"""`python -m tests.standin.accounts`: what lies on this machine's GPUs, as JSON."""

import sys

import msgspec

from tests.standin.gpus import Node


def main() -> None:
    """Print the accounts."""
    with Node.found() as node:
        sys.stdout.buffer.write(msgspec.json.encode(node.read()))


if __name__ == "__main__":
    main()
