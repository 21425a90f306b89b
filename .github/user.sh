#!/usr/bin/env bash
# Installs a release of the index in ./published as a user would: another user, the client of the index alone, no checkout, no token.
# CHANNEL and STACK name the release. What runs here comes out of the wheels, so that user may change nothing that is pushed afterwards.
set -euo pipefail

root=()
[[ $(id -u) == 0 ]] || root=(sudo -n -E)
id -u reader >/dev/null 2>&1 || "${root[@]}" useradd --create-home reader
folder=$("${root[@]}" mktemp -d /tmp/reader-XXXXXX)
"${root[@]}" cp -r published/index "$folder/index"
"${root[@]}" chown -R reader "$folder"
# shellcheck disable=SC2016  # the other user's shell expands it
"${root[@]}" env -C "$folder" -u VIRTUAL_ENV HOME="$folder" PATH=/usr/local/bin:/usr/bin:/bin \
    setpriv --reuid=reader --regid=reader --init-groups --no-new-privs bash -euo pipefail -c '
        python3 -m venv user
        user/bin/python -m pip download --quiet --no-deps --index-url "file://$PWD/index/simple/$CHANNEL/" --dest client sparkwright-install
        user/bin/python -m pip install --quiet client/*.whl
        # The publisher has held this root against the one in ci/release.yaml.
        fingerprint=$(sha256sum index/metadata/1.root.json | cut -d" " -f1)
        user/bin/sparkwright install --prefix prefix --index "$PWD/index" --trust "$fingerprint" --stack "$STACK" --channel "$CHANNEL"
        user/bin/sparkwright doctor --prefix prefix --deep
    '
"${root[@]}" rm -rf "$folder"
