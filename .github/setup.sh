#!/usr/bin/env bash
# Installs this checkout's program into .venv and puts it on the path of the job's later steps; a site's own config.yaml and trust.yaml come
# with it. Arguments are packages of Debian or Ubuntu that the job needs besides; those that are missing are installed.
set -euo pipefail

missing=()
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]})); then
    root=()
    [[ $(id -u) == 0 ]] || root=(sudo)
    "${root[@]}" apt-get update -qq
    "${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check ".[full]"
echo "$PWD/.venv/bin" >>"$GITHUB_PATH"
if [[ -n ${SITE_CONFIG:-}${SITE_TRUST:-} ]]; then
    printf '%s\n' "${SITE_CONFIG:-mirrors: {\}}" >"$RUNNER_TEMP/config.yaml"
    rm -f "$RUNNER_TEMP/trust.yaml"
    [[ -z ${SITE_TRUST:-} ]] || printf '%s\n' "$SITE_TRUST" >"$RUNNER_TEMP/trust.yaml"
    echo "SPARKWRIGHT_CONFIG=$RUNNER_TEMP/config.yaml" >>"$GITHUB_ENV"
fi
.venv/bin/sparkwright --version
