#!/bin/sh
# Builds libra/scheduler, libra/toolenv and libra/worker, tagged with the version and `latest`.
#
#   build.sh [--local] [IMAGE...]
#
# --local needs no image registry: it builds on the bases that local-base.sh makes of Debian packages, and brings torch
# in deploy/images/wheels. From the environment: PYTHON_IMAGE, PIP_INDEX_URL, PIP_COMPILE, TORCH_INDEX_URL (see Dockerfile),
# SOURCE (address of the source, for the label).
set -eu
cd "$(dirname "$0")/../.."

local=
if [ "${1:-}" = --local ]; then
    local=yes
    shift
fi
[ $# -gt 0 ] || set -- scheduler toolenv worker
for image in "$@"; do
    case $image in
        scheduler | toolenv | worker) ;;
        *) echo "build.sh: no image $image; expected scheduler, toolenv or worker" >&2; exit 2 ;;
    esac
done

field() { sed -n "s/^$1 = \"\(.*\)\"\$/\1/p" pyproject.toml | head -n 1; }
version=$(field version)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision="$revision-dirty"

if [ "$local" ]; then
    sh deploy/images/local-base.sh python
    : "${PYTHON_IMAGE:=libra-local/python:bookworm}"
    case " $* " in
        *" worker "*)
            torch=$(sed -n 's/^torch==//p' constraints.txt)
            ls deploy/images/wheels/torch-"$torch"*.whl >/dev/null 2>&1 \
                || python3 -m pip download -q --no-deps -d deploy/images/wheels "torch==$torch"
            ;;
    esac
fi

for image in "$@"; do
    # the host's network: what reaches pip's index from here reaches it from the build
    docker build --network host --file deploy/images/Dockerfile --target "$image" \
        --build-arg VERSION="$version" --build-arg REVISION="$revision" --build-arg SOURCE="${SOURCE:-unknown}" \
        ${PYTHON_IMAGE:+--build-arg PYTHON_IMAGE="$PYTHON_IMAGE"} \
        ${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL="$PIP_INDEX_URL"} \
        ${PIP_COMPILE:+--build-arg PIP_COMPILE="$PIP_COMPILE"} \
        ${TORCH_INDEX_URL:+--build-arg TORCH_INDEX_URL="$TORCH_INDEX_URL"} \
        --tag "libra/$image:$version" --tag "libra/$image:latest" .
done
docker image ls --filter 'reference=libra/*'
