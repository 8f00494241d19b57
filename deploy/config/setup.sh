#!/bin/sh
# Makes each password that is not there yet. To bring your own, write the file before the first start.
set -eu
# the user of the images
libra=10001
for folder in /secrets/db /secrets/grafana /secrets/trainers; do
    if [ ! -s "$folder/password" ]; then
        head -c 24 /dev/urandom | base64 >"$folder/password.part"
        # Postgres and Grafana read theirs as users of their own; the volume is mounted by those who need it alone
        chmod 0444 "$folder/password.part"
        if [ "$folder" = /secrets/trainers ]; then
            chmod 0400 "$folder/password.part"
            chown "$libra:$libra" "$folder/password.part"
        fi
        mv "$folder/password.part" "$folder/password"
        echo "made $folder/password"
    fi
done
