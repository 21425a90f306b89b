#!/usr/bin/env bash
# Installs this checkout's program into .venv and puts it on the path of the job's later steps; a site's own config.yaml comes
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
# By hash, and from wheels alone, because jobs that hold keys are prepared by this script, too:
#   uv pip compile --universal --python-version 3.11 --no-strip-extras --generate-hashes --no-annotate --no-header \
#       pyproject.toml .github/requirements.in --extra full --output-file .github/requirements.txt
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
"${install[@]}" --require-hashes --only-binary :all: --requirement .github/requirements.txt
"${install[@]}" --no-deps --no-build-isolation .
echo "$PWD/.venv/bin" >>"$GITHUB_PATH"
if [[ -n ${SITE_CONFIG:-} ]]; then
    printf '%s\n' "$SITE_CONFIG" >"$RUNNER_TEMP/config.yaml"
    echo "SPARKWRIGHT_CONFIG=$RUNNER_TEMP/config.yaml" >>"$GITHUB_ENV"
fi
.venv/bin/sparkwright --version
