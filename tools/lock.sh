#!/bin/sh
# Write the lock files from pyproject.toml, with the hashes of all files of each package:
#   requirements.lock      what podfabric runs with: for an image, and for a node
#   requirements-dev.lock  what the checks, tests and builds need beside it
# Versions stay as they are where they still fit; `tools/lock.sh --upgrade` takes the newest.
set -eu
cd "$(dirname "$0")/.."

# Only this script needs it, so it is not part of the development environment.
[ -x build/lock/bin/uv ] || {
    /usr/bin/python3 -m venv --clear build/lock
    build/lock/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
}

compile() {
    build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-header --no-annotate "$@" pyproject.toml
}

compile --output-file requirements.lock "$@"
# The runtime packages are in their own file, with their own hashes; this file keeps their versions.
runtime=$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' requirements.lock)
# shellcheck disable=SC2086
compile --extra dev --constraint requirements.lock $runtime --output-file requirements-dev.lock "$@"
