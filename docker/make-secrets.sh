#!/bin/sh
# Makes random passwords for the two servers of compose.yaml, in docker/secrets. Run it once, before `docker compose up`.
# Passwords that are there stay: remove docker/secrets for new ones, and start the stack again.
set -eu
cd "$(dirname "$0")"
[ ! -e secrets ] || { echo "docker/secrets is there already and stays as it is" >&2; exit 0; }
umask 077
made=$(mktemp -d ./secrets.XXXXXX)
for name in redis queue; do
    password=$(od -A n -N 32 -t x1 /dev/urandom | tr -d ' \n')
    # printf belongs to the shell: no list of processes shows what it prints
    printf 'requirepass %s\n' "$password" >"$made/$name-auth"
    printf 'redis://default:%s@%s:6379\n' "$password" "$name" >"$made/$name-url"
done
# The users of the containers have other numbers, so the files are readable. Others on this host cannot enter the folder.
chmod 644 "$made"/*
mv "$made" secrets
