#!/usr/bin/env bash
# The branch `published`: the index, the records of nights, the last drift, and the site made of them. `get` brings it to ./published,
# `put` commits what changed there and pushes it. Nothing is ever forced: who is too late begins again.
set -euo pipefail

branch=published
url=$GITHUB_SERVER_URL/$GITHUB_REPOSITORY

# The token reaches git by its environment: a command line is seen by every process, and a configuration file stays behind.
if [[ -n ${TOKEN:-} ]]; then
    GIT_CONFIG_COUNT=1
    GIT_CONFIG_KEY_0=http.extraheader
    GIT_CONFIG_VALUE_0="AUTHORIZATION: basic $(printf 'x-access-token:%s' "$TOKEN" | base64 -w0)"
    export GIT_CONFIG_COUNT GIT_CONFIG_KEY_0 GIT_CONFIG_VALUE_0
fi

case ${1:-} in
get)
    rm -rf published
    if git ls-remote --exit-code --heads "$url" "$branch" >/dev/null; then
        git clone --quiet --depth 1 --branch "$branch" "$url" published
    else
        # Status 2 alone means that there is no such branch; a host that does not answer is no reason to begin an empty one.
        status=0
        git ls-remote --exit-code --heads "$url" "$branch" >/dev/null || status=$?
        ((status == 2)) || { echo "$url does not answer" >&2; exit 1; }
        git init --quiet --initial-branch="$branch" published
    fi
    ;;
put)
    cd published
    git add --all
    if git diff --cached --quiet; then
        echo "nothing changed"
        exit 0
    fi
    git -c user.name=sparkwright -c user.email=sparkwright@users.noreply.github.com commit --quiet -m "${2:?what changed}"
    git push --quiet "$url" "HEAD:refs/heads/$branch"
    ;;
*)
    echo "usage: $0 get | put MESSAGE" >&2
    exit 2
    ;;
esac
