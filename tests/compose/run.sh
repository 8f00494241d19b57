#!/bin/sh
# make test-compose: an engine, the images, then the story of docs/deploy.md with kills and a change of scale.
#
# Where no engine runs and none can be started, it says why and is skipped. Where the base images cannot be pulled, they
# are made of Debian packages. The engine that it started it stops again; images stay in the engine's folder.
set -eu
cd "$(dirname "$0")/../.."
python=${1:?run.sh PYTHON}
engine="sh deploy/images/engine.sh"

if $engine status >/dev/null 2>&1; then
    started=
else
    if ! $engine start --install; then
        echo "make test-compose: skipped, for the reason above"
        exit 0
    fi
    started=yes
fi
finish() { [ -z "$started" ] || $engine stop --force; }
trap finish EXIT
trap 'exit 130' INT TERM

base=$(sed -n 's/^ARG PYTHON_IMAGE=//p' deploy/images/Dockerfile | head -n 1)
if timeout 120 docker pull -q "$base" >/dev/null 2>&1; then
    sh deploy/images/build.sh
else
    echo "no image registry can be reached ($base): base images are made of Debian packages"
    sh deploy/images/local-base.sh
    sh deploy/images/build.sh --local
    export LIBRA_TEST_LOCAL=1
fi
"$python" -m pytest -m compose -x -v -s --timeout 1800 tests/compose
