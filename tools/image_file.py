"""Print a file of an OCI archive: `image_file.py ARCHIVE PATH`. The last layer with the file
wins."""

import json
import sys
import tarfile
from pathlib import PurePosixPath
from typing import IO, Any


def main() -> None:
    """Print the file; exit with 1 if no layer has it."""
    archive, name = sys.argv[1:]
    with tarfile.open(archive) as whole:
        for layer in reversed(manifest(whole)["layers"]):
            with tarfile.open(fileobj=blob(whole, layer["digest"])) as files:
                for member in files:
                    if PurePosixPath(member.name) == PurePosixPath(name):
                        sys.stdout.buffer.write(_content(files.extractfile(member)))
                        return
    raise SystemExit(f"{archive}: no layer has {name}")


def manifest(archive: tarfile.TarFile) -> dict[str, Any]:
    """The manifest of the archive's first image."""
    index = json.load(_file(archive, "index.json"))
    found: dict[str, Any] = json.load(blob(archive, index["manifests"][0]["digest"]))
    return found


def blob(archive: tarfile.TarFile, digest: str) -> IO[bytes]:
    """A blob of the archive."""
    return _file(archive, f"blobs/{digest.replace(':', '/')}")


def _file(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    assert file is not None, name
    return file


def _content(file: IO[bytes] | None) -> bytes:
    return file.read() if file is not None else b""


if __name__ == "__main__":
    main()
