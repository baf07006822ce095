"""`python -m tests.standin.accounts` prints the contents of this machine's GPUs as JSON."""

import sys

import msgspec

from tests.standin.gpus import Node


def main() -> None:
    """Print the accounts."""
    with Node.found() as node:
        sys.stdout.buffer.write(msgspec.json.encode(node.read()))


if __name__ == "__main__":
    main()
