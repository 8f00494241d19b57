#!/bin/sh
# A Docker engine for the image builds and their tests, on machines where no init system runs one.
#
#   engine.sh start [--install] | stop [--force] | status        [--state FOLDER], /var/lib/libra-engine by default
#
# start: the engine that answers already is used; otherwise dockerd is started by hand, which needs root. --install
# gets it from Debian first. stop ends what start started, by its pid, and nothing else; images stay in the folder. While
# containers run in it (a build is one), others may be at work there: stop then wants --force.
# status: 0 if an engine answers. Exit code 3: there can be no engine here, for the reason printed; tests then skip.
set -eu

START_SECONDS=60
STOP_SECONDS=30

state=/var/lib/libra-engine
install=
force=
command=${1:-}
[ $# -eq 0 ] || shift
while [ $# -gt 0 ]; do
    case $1 in
        --install) install=yes ;;
        --force) force=yes ;;
        --state) state=${2:?--state needs a folder}; shift ;;
        *) command=help ;;
    esac
    shift
done
pid_file=$state/dockerd.pid
log=$state/dockerd.log

cannot() { echo "no Docker engine: $1"; exit 3; }

answers() { command -v docker >/dev/null && docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# the pid of the dockerd that we started, if it lives: a pid may be somebody else's by now
ours() {
    pid=$(cat "$pid_file" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}

describe() {
    docker info --format '{{.ServerVersion}}, storage {{.Driver}}, cgroups {{.CgroupDriver}} v{{.CgroupVersion}}, {{.DockerRootDir}}'
}

start() {
    if answers; then
        echo "the engine that runs is used: $(describe)"
        return
    fi
    [ "$(id -u)" = 0 ] || cannot "none answers, and only root can start dockerd"
    if [ "$install" ] && ! command -v dockerd >/dev/null; then
        install_packages || cannot "Debian's docker.io could not be installed; $state/install.log says why"
    fi
    for program in docker dockerd containerd; do
        command -v "$program" >/dev/null || cannot "$program is not installed (--install gets it from Debian)"
    done
    mkdir -p "$state"
    : >"$log"
    launch || without_iptables \
        || cannot "dockerd ended: $(sed -n 's/^failed to start daemon: //p' "$log" | tail -n 1) (all of it in $log)"
    echo "started: $(describe)"
    case $(docker info --format '{{.Driver}}') in
        vfs) echo "warning: neither overlay2 nor fuse-overlayfs works here; vfs copies every layer whole" ;;
    esac
}

# A kernel without netfilter, or no iptables: containers then have no way to the outside, and ports are forwarded by a
# process, but they reach each other and the host reaches them.
without_iptables() {
    grep -q 'failed to start daemon:.*iptables' "$log" || return 1
    echo "iptables does not work here: containers get networks among themselves only"
    launch --iptables=false --ip6tables=false
}

install_packages() {
    mkdir -p "$state"
    {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            docker.io docker-compose debootstrap iptables
    } >"$state/install.log" 2>&1
}

# Starts dockerd and waits until it answers; fails if it ends. It chooses the storage driver itself: overlay2 where the
# folder's file system bears it, else fuse-overlayfs if that is installed, else vfs.
launch() {
    rm -f "$pid_file"
    # a session of its own: Ctrl-C in the terminal that started it is not meant for it
    setsid dockerd --data-root "$state/data" --exec-root "$state/exec" --pidfile "$pid_file" "$@" \
        >>"$log" 2>&1 </dev/null &
    starting=$!
    waited=0
    until answers; do
        kill -0 "$starting" 2>/dev/null || return 1
        [ "$waited" -lt $((START_SECONDS * 5)) ] || { end "$starting"; return 1; }
        waited=$((waited + 1))
        sleep 0.2
    done
}

# SIGTERM to dockerd ends its containers, then its containerd
end() {
    kill "$1" 2>/dev/null || return 0
    waited=0
    while [ -e "/proc/$1" ] && [ "$waited" -lt $((STOP_SECONDS * 5)) ]; do
        waited=$((waited + 1))
        sleep 0.2
    done
    [ ! -e "/proc/$1" ] || kill -KILL "$1"
}

stop() {
    pid=$(ours) || { echo "no engine of ours runs ($pid_file)"; return; }
    running=$(timeout 10 docker ps --quiet | wc -l)
    if [ "$running" != 0 ] && [ -z "$force" ]; then
        echo "containers that run in it: $running; stop --force ends them too" >&2
        exit 1
    fi
    containerd=$(cat "$state/exec/containerd/containerd.pid" 2>/dev/null || true)
    end "$pid"
    if [ -n "$containerd" ] && [ "$(cat "/proc/$containerd/comm" 2>/dev/null)" = containerd ]; then
        end "$containerd"
    fi
    echo stopped
}

case $command in
    start) start ;;
    stop) stop ;;
    status)
        answers || cannot "none answers"
        if pid=$(ours); then echo "ours, pid $pid, log $log: $(describe)"; else echo "not ours: $(describe)"; fi
        ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
