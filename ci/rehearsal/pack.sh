#!/bin/bash
# pack.sh DIST STOCK MODEL STORE WORK OUTPUT [PART]: pack the rehearsal of 9.0a.yaml for a host with Python 3.12 and torch 2.11.0
#   DIST    folder with the wheel of stack 2026.06 for 9.0a and its verdicts (`nox -s build -- --stack 2026.06 --arch 9.0a`, `gate --only G0 --only G1`)
#   STOCK   the official wheel under it
#   MODEL   the small model: tests/server/trained.py in an environment with torch and transformers
#   STORE   the store, with the audits of DIST and vllm-rs (`bench` fetches it)
#   WORK    folder for what is packed; OUTPUT: folder for parts of PART megabytes (default: 55)
set -eu
dist=$1 stock=$2 model=$3 store=$4 work=$5 output=$6 part=${7:-55}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$work/program" "$work/store/records" "$work/store/environments"
git -C "$root" archive HEAD ci forks build cherry_picks pyproject.toml README.md | tar x -C "$work/program"
cp -r "$store/records/audit" "$work/store/records/"
cp -r "$store"/environments/vllm-rs-* "$work/store/environments/"
# vLLM's tuner, which is in its source and not in its wheel
tree=$(sed -n '/^  vllm:/,/sdist:/s/^      tree: //p' "$root/forks/2026.06/lock.yaml")
git --git-dir="$store/objects.git" show "$tree:benchmarks/kernels/benchmark_moe.py" > "$work/benchmark_moe.py"
for site in serve tool harness; do
  [ -d "$work/$site" ] && continue
  uv pip install --quiet --target "$work/$site.part" --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
    --requirements "$root/ci/rehearsal/requirements/$site.txt"
  find "$work/$site.part" -name '*.so*' -type f -exec strip --strip-unneeded {} +
  mv "$work/$site.part" "$work/$site"
done
files=()
for path in "$dist"/*; do files+=(--add "dist/${path##*/}=$path"); done
sparkwright release bundle "$root/ci/rehearsal/9.0a.yaml" --output "$output" --part "$part" "${files[@]}" --add "stock/${stock##*/}=$stock" \
  --add "tuner/benchmark_moe.py=$work/benchmark_moe.py" --add "models/trained=$model" --add "program=$work/program" --add "store=$work/store" \
  --add "sites/serve=$work/serve" --add "sites/tool=$work/tool" --add "sites/harness=$work/harness"
