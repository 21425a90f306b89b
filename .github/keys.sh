#!/usr/bin/env bash
# The keys of the index, from secrets to files in ./keys that only this user can read. The root key never comes here.
set -euo pipefail
umask 077
mkdir -p keys
printf '%s\n' "${ONLINE_KEY:?the secret ONLINE_KEY is not set}" >keys/online.pem
if [[ -n ${TARGETS_KEY:-} ]]; then
    printf '%s\n' "$TARGETS_KEY" >keys/targets.pem
fi
