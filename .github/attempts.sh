#!/usr/bin/env bash
# Copies the verdicts that ./published has about the wheels in the folder $2 into the folder $1, under names of no wheel: the gates read the attempts
# with the same bytes from them, and nothing else, so that a night does not begin to count anew.
set -euo pipefail

number=0
for wheel in "$2"/*.whl; do
    name=$(basename "$wheel" .whl).verdicts.json
    while IFS= read -r file; do
        number=$((number + 1))
        cp "$file" "$1/carried-$number.verdicts.json"
    done < <(find published/index/files -name "$name" 2>/dev/null | sort)
done
