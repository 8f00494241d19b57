#!/bin/sh
# Checks the contract against the last release tag (v*); before the first release there is nothing to break.
set -eu
cd "$(dirname "$0")"
tag=$(git describe --tags --match 'v*' --abbrev=0 2>/dev/null || true)
if [ -z "$tag" ]; then
    echo "buf breaking: no release tag v* yet, nothing to compare with"
    exit 0
fi
buf breaking --against "../.git#tag=$tag,subdir=proto"
