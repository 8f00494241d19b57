#!/bin/sh
# Makes the base images of deploy/images without an image registry, from Debian's packages (debootstrap, docker import):
#
#   local-base.sh [--force] [python] [postgres] [prometheus]      all three by default; what exists is kept
#
# They take over what this machine needs to reach packages: apt's sources and settings, certificate authorities, pip's
# index. That makes them images for this machine, not to be published. Needs root, a Docker engine, debootstrap.
set -eu
cd "$(dirname "$0")"

release=bookworm
force=
if [ "${1:-}" = --force ]; then
    force=yes
    shift
fi
[ $# -gt 0 ] || set -- python postgres prometheus
for name in "$@"; do
    case $name in
        python | postgres | prometheus) ;;
        *) echo "local-base.sh: no image $name; expected python, postgres or prometheus" >&2; exit 2 ;;
    esac
done

absent() { [ "$force" ] || ! docker image inspect "$1" >/dev/null 2>&1; }

debian() {
    [ "$(id -u)" = 0 ] || { echo "local-base.sh: debootstrap needs root" >&2; exit 1; }
    command -v debootstrap >/dev/null || { echo "local-base.sh: install debootstrap first" >&2; exit 1; }
    folder=$(mktemp -d)
    trap 'clean "$folder"' EXIT
    trap 'exit 130' INT TERM
    root=$folder/root
    # shellcheck disable=SC2016  # $(REPO_URI) is apt's
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
        "Codename: $release" 2>/dev/null | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates "$release" "$root" ${mirror:+"$mirror"} >"$folder/log" \
        || { tail -n 20 "$folder/log" >&2; exit 1; }

    # Debian's own sources only: others would need keys of theirs
    rm -f "$root/etc/apt/sources.list"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
        [ ! -e "$file" ] || install -D -m 644 "$file" "$root$file"
    done
    # a password stands before an @: what has one stays here
    apt-config dump --no-empty --format '%f "%v";%n' | grep -E '^Acquire::(Check-|https?::)' | grep -v @ \
        >"$root/etc/apt/apt.conf.d/50host" || true
    echo 'APT::Install-Recommends "false";' >"$root/etc/apt/apt.conf.d/51minimal"
    # messages in other languages are a third of the whole
    echo 'path-exclude=/usr/share/locale/*' >"$root/etc/dpkg/dpkg.cfg.d/minimal"
    rm -rf "$root"/usr/share/locale/*
    for file in /usr/local/share/ca-certificates/*.crt; do
        [ ! -e "$file" ] || install -D -m 644 "$file" "$root$file"
    done
    chroot "$root" update-ca-certificates >/dev/null 2>&1
    pip_settings >"$root/etc/pip.conf"

    tar -C "$root" --numeric-owner --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' --exclude='./run/*' \
        --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./var/log/*' -c . \
        | docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["bash"]' - "libra-local/debian:$release" >/dev/null
    clean "$folder"
    trap - EXIT INT TERM
}

# pip's settings that are addresses or certificates. Folders of this machine are of no use in an image.
pip_settings() {
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
    for key in index-url extra-index-url trusted-host proxy timeout; do
        value=$(python3 -m pip config get "global.$key" 2>/dev/null | tr ' ' '\n' | grep -v -e '^file:' -e @ | xargs) || true
        [ -z "$value" ] || printf '%s = %s\n' "$key" "$value"
    done
}

# debootstrap mounts proc in the folder and may be interrupted before it takes it away
clean() {
    for mounted in "$1/root/proc" "$1/root/sys"; do
        ! mountpoint -q "$mounted" || umount "$mounted"
    done
    rm -rf --one-file-system "$1"
}

build() {
    docker build --quiet --network host --file "local/$1.Dockerfile" --tag "$2" local >/dev/null
}

tag() {
    case $1 in
        python) echo "libra-local/python:$release" ;;
        postgres) echo libra-local/postgres:15 ;;
        prometheus) echo libra-local/prometheus:2 ;;
    esac
}

based=
for name in "$@"; do
    absent "$(tag "$name")" || continue
    if [ -z "$based" ] && absent "libra-local/debian:$release"; then
        debian
    fi
    based=yes
    build "$name" "$(tag "$name")"
done

for name in "$@"; do
    docker image inspect --format '{{index .RepoTags 0}}  {{.Size}} bytes' "$(tag "$name")"
done
echo "Grafana is not in Debian: there is no local image of it, and what needs it is left out where no registry is reached."
