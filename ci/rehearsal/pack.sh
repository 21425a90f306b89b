#!/bin/bash
# pack.sh DIST STOCK MODEL STORE WORK OUTPUT [PART]: pack the rehearsal of STACK for a host with Python 3.12
#   STACK   2026.06 (9.0a.yaml, for a host with torch 2.11.0), or 2026.11 (2026.11.yaml, which brings its own); from the environment
#   DIST    folder with the wheel of the stack for 9.0a and its verdicts (`nox -s build -- --stack STACK --arch 9.0a`, `gate --only G0 --only G1`)
#   STOCK   the official wheel under it
#   MODEL   the small model: tests/server/trained.py in an environment with torch and transformers
#   STORE   the store, with the audits of DIST and vllm-rs (`bench` fetches it)
#   WORK    folder for what is packed; OUTPUT: folder for parts of PART megabytes (default: 55)
set -eu
dist=$1 stock=$2 model=$3 store=$4 work=$5 output=$6 part=${7:-55}
root=$(cd "$(dirname "$0")/../.." && pwd) stack=${STACK:-2026.06} spec=9.0a.yaml sites=(serve tool harness) suffix='' options=()
mkdir -p "$work/program" "$work/store/records" "$work/store/environments"
if [ "$stack" = 2026.11 ]; then
  spec=2026.11.yaml suffix=-2026.11 options=(--trim --add "sites/torch=$work/torch")
  sites+=(torch)
fi
git -C "$root" archive HEAD ci forks build cherry_picks tests/server pyproject.toml README.md | tar x -C "$work/program"
cp -r "$store/records/audit" "$work/store/records/"
# The load generator of G8, which not every rehearsal has
for folder in "$store"/environments/vllm-rs-*; do
  [ ! -d "$folder" ] || cp -r "$folder" "$work/store/environments/"
done
for site in "${sites[@]}"; do
  [ -d "$work/$site" ] && continue
  uv pip install --quiet --link-mode copy --target "$work/$site.part" --no-deps --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
    --requirements "$(ls "$root/ci/rehearsal/requirements/$site$suffix.txt" 2>/dev/null || echo "$root/ci/rehearsal/requirements/$site.txt")"
  # No start needs headers, programs, or the tables of other makers' GPUs.
  rm -rf "$work/$site.part"/torch/{include,share,bin/protoc*} "$work/$site.part"/triton/backends/nvidia/{lib/cupti*,bin/ptxas-blackwell}
  find "$work/$site.part" -name '*.so*' -type f -exec strip --strip-unneeded {} +
  mv "$work/$site.part" "$work/$site"
done
files=()
for path in "$dist"/*; do files+=(--add "dist/${path##*/}=$path"); done
sparkwright release bundle "$root/ci/rehearsal/$spec" --output "$output" --part "$part" "${options[@]}" "${files[@]}" --add "stock/${stock##*/}=$stock" \
  --add "models/trained=$model" --add "program=$work/program" --add "store=$work/store" \
  --add "sites/serve=$work/serve" --add "sites/tool=$work/tool" --add "sites/harness=$work/harness"
