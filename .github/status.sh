#!/usr/bin/env bash
# Makes the status page of what is in ./published. Before the first release there is no index, and runs are to be seen all the same.
set -euo pipefail

mapfile -t drift < <(find published/drift -name '*.json' 2>/dev/null | sort)
index=()
if [[ -e published/index ]]; then
    index=(--index=published/index --trust="$(sha256sum <published/index/metadata/1.root.json | cut -d' ' -f1)")
fi
sparkwright lab status --stack="$STACK" "${index[@]}" --runs "$GITHUB_REPOSITORY" "${drift[@]/#/--drift=}" --output published/site
