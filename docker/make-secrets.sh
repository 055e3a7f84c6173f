#!/bin/sh
# Makes random passwords for the two servers of compose.yaml and for Grafana, in docker/secrets. Run it once, before
# `docker compose up`. Passwords that are there stay: remove docker/secrets for new ones, and start the stack again.
set -eu
cd "$(dirname "$0")"
umask 077
random() { od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n'; }
if [ -e secrets ]; then
    echo "docker/secrets is there already and stays as it is" >&2
    [ ! -e secrets/grafana-password ] || exit 0
    echo "docker/secrets/grafana-password is new: earlier versions made none" >&2
    random >secrets/grafana-password
    chmod 644 secrets/grafana-password
    exit 0
fi
made=$(mktemp -d ./secrets.XXXXXX)
for name in redis queue; do
    password=$(random)
    # printf belongs to the shell: no list of processes shows what it prints
    printf 'requirepass %s\n' "$password" >"$made/$name-auth"
    printf 'redis://default:%s@%s:6379\n' "$password" "$name" >"$made/$name-url"
done
random >"$made/grafana-password"
# The users of the containers have other numbers, so the files are readable. Others on this host cannot enter the folder.
chmod 644 "$made"/*
mv "$made" secrets
