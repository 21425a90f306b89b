#!/usr/bin/env bash
# Sends ./wheels to the immutable release $TAG of the public repository: first into a draft, which is published once all of them lie there. A second
# run goes on with the draft of the first. That GitHub keeps these very bytes is shown by the installation that follows, before the index is pushed.
set -euo pipefail

state() {
    gh release view "$TAG" --repo "$PUBLIC_REPOSITORY" --json isDraft,isImmutable --jq '"\(.isDraft) \(.isImmutable)"' 2>/dev/null || true
}

if [[ -z $(state) ]]; then
    gh release create "$TAG" --repo "$PUBLIC_REPOSITORY" --draft --title "$TAG" --notes "Made by sparkwright. The signed index names these files by hash."
fi
if [[ $(state) == true* ]]; then
    gh release upload "$TAG" --repo "$PUBLIC_REPOSITORY" --clobber wheels/*.whl
    gh release edit "$TAG" --repo "$PUBLIC_REPOSITORY" --draft=false
fi
if [[ $(state) != "false true" ]]; then
    gh release edit "$TAG" --repo "$PUBLIC_REPOSITORY" --draft || true
    echo "::error::The release $TAG could be changed after its publication, so it is a draft again. Switch on immutable releases in the settings of $PUBLIC_REPOSITORY."
    exit 1
fi
