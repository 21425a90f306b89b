#!/usr/bin/env bash
# Refuses the run $RUN unless it is an ended one of the pipeline, on the default branch of this repository: verdicts of others are not signed.
set -euo pipefail

[[ $RUN =~ ^[0-9]+$ ]] || { echo "::error::$RUN is no number of a run"; exit 1; }
# The token reaches curl by its input: a command line is seen by every process.
curl --fail --silent --show-error --header @- "$GITHUB_API_URL/repos/$GITHUB_REPOSITORY/actions/runs/$RUN" \
    <<<"Authorization: Bearer $GITHUB_TOKEN" >run.json
if ! jq --exit-status --arg repository "$GITHUB_REPOSITORY" '
    (.path | split("@")[0]) == ".github/workflows/pipeline.yml" and .head_branch == "main" and .status == "completed"
    and .head_repository.full_name == $repository and (.event == "schedule" or .event == "workflow_dispatch")' run.json >/dev/null; then
    echo "::error::The run $RUN is no ended run of pipeline.yml on main of $GITHUB_REPOSITORY"
    exit 1
fi
