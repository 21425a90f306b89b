#!/usr/bin/env bash
# Brings the verdicts of the audit and of the gate together in ./verdicts. The gate says something of the wheel that serves alone:
# another file of its artifact would replace what the audit found.
set -euo pipefail

mkdir -p verdicts
if [[ -d audited ]]; then cp audited/* verdicts/; fi
if [[ -d gated ]]; then
    for file in gated/*; do
        case ${file#gated/} in
        *vllm-*.verdicts.json | *vllm-*.attempts.jsonl | *vllm-*.throughput.json) cp "$file" verdicts/ ;;
        *) echo "::error::${file#gated/} is no verdict about the wheel that serves" && exit 1 ;;
        esac
    done
fi
