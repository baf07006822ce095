#!/bin/sh
# Run a tool that is written in Go: `tools/go_tool.sh helm lint deploy/chart`. The tool is built
# once, from the Go module proxy, into ${PODFABRIC_CACHE:-~/.cache/podfabric}/tools. The build of
# promtool takes up to 25 minutes on a busy machine.
# `tools/go_tool.sh --path helm` prints its path.
set -eu

only_path=
[ "${1:-}" != --path ] || { only_path=yes; shift; }
name=${1:-}
case "$name" in
helm) package=helm.sh/helm/v3/cmd/helm version=v3.22.0 ;;
kustomize) package=sigs.k8s.io/kustomize/kustomize/v5 version=v5.7.1 ;;
promtool) package=github.com/prometheus/prometheus/cmd/promtool version=v0.316.0 ;;
*) echo "usage: tools/go_tool.sh [--path] helm|kustomize|promtool [ARGUMENT...]" >&2; exit 2 ;;
esac
shift

directory=${PODFABRIC_CACHE:-$HOME/.cache/podfabric}/tools/$name-$version
if [ ! -x "$directory/$name" ]; then
    command -v go >/dev/null || {
        echo "tools/go_tool.sh: install Go, or put $name $version at $directory/$name" >&2
        exit 1
    }
    mkdir -p "$directory"
    # Two tests may get here at once; one of them builds.
    exec 9>"$directory/lock"
    flock 9
    if [ ! -x "$directory/$name" ]; then
        GOBIN=$directory/new CGO_ENABLED=0 nice -n 10 \
            go install -trimpath -ldflags "-s -w" "$package@$version"
        mv "$directory/new/$name" "$directory/$name"
    fi
    exec 9>&-
fi
if [ "$only_path" ]; then
    echo "$directory/$name"
else
    exec "$directory/$name" "$@"
fi
