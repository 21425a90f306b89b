#!/usr/bin/env bash
# Copies the verdicts of the audit and of the gate to ./verdicts. The gate judges the wheel of vLLM alone; any other file of its artifact
# could replace a verdict of the audit, and is refused.
set -euo pipefail

mkdir -p verdicts
if [[ -d audited ]]; then cp audited/* verdicts/; fi
if [[ -d gated ]]; then
    for file in gated/*; do
        case ${file#gated/} in
        *vllm-*.verdicts.json | *vllm-*.attempts.jsonl | *vllm-*.throughput.json | *vllm-*.canary.json) cp "$file" verdicts/ ;;
        *) echo "::error::${file#gated/} is no verdict about the wheel that serves" && exit 1 ;;
        esac
    done
fi
