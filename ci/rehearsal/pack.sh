#!/bin/bash
# pack.sh DIST STOCK MODEL STORE WORK OUTPUT [PART]: pack the rehearsal of STACK for a host with Python 3.12.
# On the host: sha256sum -c SHA256SUMS && cat part-* | tar xJ -C ROOT && python3 ROOT/program/ci/rehearsal/host.py setup ROOT, then run
#   STACK   2026.06 (9.0a.yaml, for a host with torch 2.11.0), or 2026.11 (2026.11.yaml, which brings its own); from the environment
#   DIST    folder with the wheel of the stack for 9.0a and its verdicts (`nox -s build -- --stack STACK --arch 9.0a`, `gate --only G0 --only G1`)
#   STOCK   the official wheel under it
#   MODEL   the small model: tests/server/trained.py in an environment with torch and transformers
#   STORE   the store, with the audits of DIST and vllm-rs (`bench` fetches it)
#   WORK    folder for what is packed; OUTPUT: folder for parts of PART megabytes (default: 55)
set -eu
dist=$1 stock=$2 model=$3 store=$4 work=$5 output=$6 part=${7:-55}
root=$(cd "$(dirname "$0")/../.." && pwd) stack=${STACK:-2026.06} spec=9.0a.yaml sites=(serve tool harness) suffix=''
mkdir -p "$work/program" "$work/store/records" "$work/store/environments"
if [ "$stack" = 2026.11 ]; then
  spec=2026.11.yaml suffix=-2026.11
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
bundle=$work/bundle
rm -rf "$bundle"
mkdir -p "$bundle/sites" "$bundle/models" "$bundle/stock" "$output"
for site in "${sites[@]}"; do ln -s "$(realpath "$work/$site")" "$bundle/sites/"; done
ln -s "$(realpath "$dist")" "$bundle/dist"
ln -s "$(realpath "$stock")" "$bundle/stock/"
ln -s "$(realpath "$model")" "$bundle/models/trained"
ln -s "$(realpath "$work/program")" "$(realpath "$work/store")" "$bundle"
python3 -c 'import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)' "$root/ci/rehearsal/$spec" >"$bundle/plan.json"
# Two builds of a wheel share most members, which a large dictionary finds again.
tar --dereference --exclude __pycache__ -C "$bundle" -c . | xz --lzma2=preset=1,dict=512MiB | split --bytes="${part}MB" --numeric-suffixes=1 --suffix-length=5 - "$output/part-"
(cd "$output" && sha256sum part-* | tee SHA256SUMS)
