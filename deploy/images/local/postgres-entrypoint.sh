#!/bin/bash
# Part of the official image's contract: POSTGRES_USER, POSTGRES_DB, POSTGRES_PASSWORD or POSTGRES_PASSWORD_FILE, PGDATA;
# a new cluster at the first start, passwords (scram-sha-256) from the network, trust on the local socket.
# Not here: /docker-entrypoint-initdb.d, POSTGRES_INITDB_ARGS, POSTGRES_HOST_AUTH_METHOD.
set -euo pipefail

[ "${1:-}" = postgres ] || [ "${1#-}" != "${1:-}" ] || exec "$@"
[ "$1" = postgres ] && shift

# a secret may be readable by root only, and a volume belong to it, so both are seen to before root is left
if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
    POSTGRES_PASSWORD=$(<"$POSTGRES_PASSWORD_FILE")
    export POSTGRES_PASSWORD
    unset POSTGRES_PASSWORD_FILE
fi
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA"
    chown -R postgres:postgres "$PGDATA"
    chmod 700 "$PGDATA"
    exec setpriv --reuid=postgres --regid=postgres --init-groups -- bash "$0" postgres "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    [ -n "${POSTGRES_PASSWORD:-}" ] || { echo "set POSTGRES_PASSWORD_FILE to the file of the password" >&2; exit 1; }
    initdb --username="$user" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") --encoding=UTF8 --locale=C.UTF-8 \
        --auth-local=trust --auth-host=scram-sha-256
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    [ "$database" = postgres ] || postgres --single -D "$PGDATA" postgres <<<"CREATE DATABASE \"$database\";" >/dev/null
fi
unset POSTGRES_PASSWORD
exec postgres -c listen_addresses='*' "$@"
