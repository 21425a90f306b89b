#!/usr/bin/env bash
# The branch `published` of the public repository, which holds the index. `get` brings it to ./published, `version` prints the version of
# its index (0 for none), and `put` commits what changed there and pushes it. Nothing is ever forced: whoever is too late begins again.
set -euo pipefail

branch=published
url=$GITHUB_SERVER_URL/${PUBLIC_REPOSITORY:-$GITHUB_REPOSITORY}

# The token reaches git by its environment: a command line is seen by every process, and a configuration file stays behind.
if [[ -n ${TOKEN:-} ]]; then
    GIT_CONFIG_COUNT=1
    GIT_CONFIG_KEY_0=http.extraheader
    GIT_CONFIG_VALUE_0="AUTHORIZATION: basic $(printf 'x-access-token:%s' "$TOKEN" | base64 -w0)"
    export GIT_CONFIG_COUNT GIT_CONFIG_KEY_0 GIT_CONFIG_VALUE_0
fi
# A repository that is private, or not there, is refused, and nobody is asked for a password.
export GIT_TERMINAL_PROMPT=0

case ${1:-} in
get)
    rm -rf published
    # Status 2 alone means that there is no such branch; a host that does not answer is no reason to begin an empty one.
    status=0
    git ls-remote --exit-code --heads "$url" "$branch" >/dev/null || status=$?
    case $status in
    0) git clone --quiet --depth 1 --branch "$branch" "$url" published ;;
    2) git init --quiet --initial-branch="$branch" published ;;
    *) echo "::error::$url does not answer, or is not public" >&2 && exit 1 ;;
    esac
    ;;
version)
    timestamp=published/index/metadata/timestamp.json
    if [[ -e $timestamp ]]; then
        python3 -c 'import json, sys; print(int(json.load(sys.stdin)["signed"]["version"]))' <"$timestamp"
    else
        echo 0
    fi
    ;;
put)
    cd published
    # Pages would leave out names that begin with a dot or an underscore.
    touch .nojekyll
    git add --all
    if git diff --cached --quiet; then
        echo "nothing changed"
        exit 0
    fi
    git -c user.name=sparkwright -c user.email=sparkwright@users.noreply.github.com commit --quiet -m "${2:?what changed}"
    git push --quiet "$url" "HEAD:refs/heads/$branch"
    ;;
*)
    echo "usage: $0 get | version | put MESSAGE" >&2
    exit 2
    ;;
esac
