#!/bin/sh
# Build the image from deploy/Containerfile, with buildah or docker, whichever is installed:
#   build/image/podfabric.tar        an OCI archive of podfabric:VERSION
#   build/image/podfabric.cdx.json   its bill of materials, which is inside, too
#
# BASE=IMAGE takes another base than Debian's slim image. BASE=local makes one from Debian's
# packages with mmdebstrap, where no registry can be reached. PUSH=REGISTRY/NAME also pushes the
# image there, as NAME:VERSION.
set -eu
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
name=${PUSH:-docker.io/library/podfabric}:$version
base=${BASE:-debian:12-slim}
out=build/image
mkdir -p "$out"

# The certificate authorities of this machine: the network may intercept TLS.
ca=/etc/ssl/certs/ca-certificates.crt
secret=
[ ! -s "$ca" ] || secret="--secret=id=ca,src=$ca"

# Debian's packages change rarely, so the base is kept outside the checkout.
local_base() {
    base=localhost/podfabric-base:bookworm
    cache=${PODFABRIC_CACHE:-$HOME/.cache/podfabric}/image
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock 9
    if [ ! -s "$cache/bookworm.tar" ]; then
        tools/setup.sh image
        # Without sources on its command line it uses Debian's, including security updates.
        mmdebstrap --variant=minbase --mode=root bookworm "$cache/bookworm.tar.new"
        mv "$cache/bookworm.tar.new" "$cache/bookworm.tar"
    fi
    if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
        container=$(buildah from scratch)
        buildah add --quiet "$container" "$cache/bookworm.tar" / >/dev/null
        buildah commit --quiet --rm "$container" "$base" >/dev/null
    fi
    flock -u 9
}

if [ "$base" = local ]; then
    command -v buildah >/dev/null || tools/setup.sh image
    local_base
fi

if command -v buildah >/dev/null; then
    # shellcheck disable=SC2086
    buildah build --isolation "${ISOLATION:-chroot}" --layers --force-rm --format oci --pull=false $secret \
        --build-arg BASE="$base" --build-arg VERSION="$version" \
        --tag "$name" --file deploy/Containerfile .
    rm -f "$out/podfabric.tar"
    buildah push --quiet "$name" "oci-archive:$out/podfabric.tar.new:$name"
    [ -z "${PUSH:-}" ] || buildah push "$name" "docker://$name"
elif command -v docker >/dev/null; then
    # shellcheck disable=SC2086
    docker buildx build $secret --build-arg BASE="$base" --build-arg VERSION="$version" \
        --file deploy/Containerfile --output "type=oci,name=$name,dest=$out/podfabric.tar.new" .
    # Existing layers come from docker's cache.
    # shellcheck disable=SC2086
    [ -z "${PUSH:-}" ] || docker buildx build $secret --build-arg BASE="$base" \
        --build-arg VERSION="$version" --file deploy/Containerfile --tag "$name" --push .
else
    echo "tools/image.sh: neither buildah nor docker is here: apt-get install buildah" >&2
    exit 1
fi
mv "$out/podfabric.tar.new" "$out/podfabric.tar"
python3 tools/image_file.py "$out/podfabric.tar" usr/share/podfabric/sbom.cdx.json \
    >"$out/podfabric.cdx.json"
echo "$out/podfabric.tar: $name"
