#!/bin/sh
# Install what podfabric's make targets need on Debian 12 or 13. It is quick, and needs no root, if
# everything is installed.
#   tools/setup.sh base    interpreter, virtual environment, compiler, iproute2: for `make cni`
#   tools/setup.sh test    and what the tests drive: runc, reference CNI plugins, a fuzzer,
#                          another architecture's compiler and emulator, and a browser
#   tools/setup.sh image   what builds the image here, and its base from Debian's packages
set -eu
cd "$(dirname "$0")/.."
# One at a time: two targets of `make -j` may run this at once.
exec 9<tools/setup.sh
flock 9

BASE="python3 python3-venv gcc libc6-dev iproute2 iputils-ping"
TEST="$BASE runc busybox-static containernetworking-plugins strace
    clang libclang-rt-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user chromium"

IMAGE="buildah mmdebstrap"

install_packages() {
    missing=
    for package in "$@"; do
        [ "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" = "install ok installed" ] ||
            missing="$missing $package"
    done
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] || { echo "tools/setup.sh: root must install:$missing" >&2; exit 1; }
    export DEBIAN_FRONTEND=noninteractive
    # The missing packages are Debian's, so a failure of another repository does not matter.
    apt-get -q update || true
    # shellcheck disable=SC2086
    apt-get -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 install $missing
}

make_environment() {
    # The scripts of a virtual environment name the interpreter's version and this directory: a copy
    # needs its own.
    wanted=$( (/usr/bin/python3 -V && pwd && cat requirements.lock requirements-dev.lock pyproject.toml tools/setup.sh) |
        sha256sum)
    [ "$(cat .venv/installed 2>/dev/null || true)" != "$wanted" ] || return 0
    # Only Debian's interpreter: the virtual machine and a chroot find it at the same path.
    /usr/bin/python3 -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --require-hashes -r requirements.lock -r requirements-dev.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
    echo "$wanted" >.venv/installed
}

case "${1:-base}" in
base) install_packages $BASE ;;
test) install_packages $TEST ;;
image) install_packages $IMAGE; exit ;;
*) echo "usage: tools/setup.sh base|test|image" >&2; exit 2 ;;
esac
make_environment
