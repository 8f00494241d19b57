#!/bin/sh
# Makes each password that is not there yet. To bring your own, write the file before the first start.
set -eu
for folder in /secrets/db /secrets/grafana; do
    if [ ! -s "$folder/password" ]; then
        head -c 24 /dev/urandom | base64 >"$folder/password.part"
        # its users run as different users; the volume is mounted by them alone
        chmod 0444 "$folder/password.part"
        mv "$folder/password.part" "$folder/password"
        echo "made $folder/password"
    fi
done
