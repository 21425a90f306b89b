#!/usr/bin/env bash
# Installs this checkout's program into .venv and puts it on the path of the job's later steps; a site's own config.yaml comes with it.
set -euo pipefail

python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check ".[full]"
echo "$PWD/.venv/bin" >>"$GITHUB_PATH"
if [[ -n ${SITE_CONFIG:-} ]]; then
    printf '%s\n' "$SITE_CONFIG" >"$RUNNER_TEMP/config.yaml"
    echo "SPARKWRIGHT_CONFIG=$RUNNER_TEMP/config.yaml" >>"$GITHUB_ENV"
fi
.venv/bin/sparkwright --version
