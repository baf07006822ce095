#!/bin/sh
# Make the root directory of the image of jobs, as a tar file: Debian 12 with programs of jobs, a
# user, and mpi_program.c, compiled with headers that are unpacked only.
#   tests/cluster/jobs_image.sh PROGRAM TAR    PROGRAM: a further executable for the image
set -eu
here=$(dirname "$(readlink -f "$0")")
command -v mmdebstrap >/dev/null || "$here/../../tools/setup.sh" image

PACKAGES=ibverbs-providers,ibverbs-utils,openmpi-bin,openssh-client,openssh-server,perftest
# Its $1 is the root directory.
# shellcheck disable=SC2016
hook='set -eu
mkdir "$1/unpacked"
(cd "$1/unpacked" && APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -q download libopenmpi-dev && dpkg -x ./*.deb .)
libraries=usr/lib/$(uname -m)-linux-gnu
gcc -std=gnu11 -O2 -Wall -Wextra -Werror "-I$1/unpacked/$libraries/openmpi/include" "$HERE/mpi_program.c" \
    "-L$1/$libraries" -l:libmpi.so.40 -Wl,--allow-shlib-undefined -o "$1/usr/bin/mpi_program"
rm -r "$1/unpacked"
cp "$PROGRAM" "$1/usr/bin"
chroot "$1" useradd --create-home --uid 1000 mpi'

HERE=$here PROGRAM=$(readlink -f "$1") mmdebstrap --quiet --variant=minbase --mode=root --format=tar \
    --include="$PACKAGES" --skip=output/dev --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --customize-hook="$hook" bookworm "$2"
