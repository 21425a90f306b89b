#!/bin/bash
# rehearse.sh ROOT STEP [NAME MODEL [WORDS…]]: one step of the rehearsal of STACK, in the folder ROOT that host.py set up
set -eu
export STACK=${STACK:-2026.11}
root=$1 step=$2 name=${3:-} model=${4:-}
rehearsal=$root/program/ci/rehearsal environments=$root/environments trained=$root/program/tests/server/trained.py
# Nights run beside each other, and a store has one at a time.
store=$root/stores/${STORE:-$name}
# Models are made before the wheels are there.
candidate=$(echo "$root"/dist/*.whl) stock=$(echo "$root"/stock/*.whl)
python() { "$environments/$1/bin/python" "${@:2}"; }
own_store() {
  if [ ! -e "$store" ]; then
    mkdir -p "$root/stores"
    cp -al "$root/store" "$store"
  fi
}
# night ENVIRONMENT OUTPUT [WORDS…]: everything, of a server from that environment; what is done is not repeated
night() {
  own_store
  ${LIMIT:+timeout --signal=KILL "$LIMIT"} "$environments/tool/bin/python" -P -m sparkwright gate "$candidate" --root "$root/program" --stack "$STACK" --arch 9.0a --offline --cache-dir "$store" \
    --output "$2" --recipe "$name" --model-folder "$root/models/$model" --profile learnt --workload rehearsal --keep-going --preheat 10 \
    --python "$environments/$1/bin/python" --baseline "$stock" --baseline-python "$environments/stock/bin/python" "${@:3}"
}
case $step in
  nvfp4 | moe | dense | large)
    rm -rf "$root/models/$step"
    python candidate "$rehearsal/models.py" "$step" "$root/models/trained" "$root/models/$step" ;;
  qwen3-next | nemotron-h | gpt-oss | gemma-4)
    rm -rf "$root/models/$step"
    python candidate "$rehearsal/architectures.py" "$step" "$root/models/trained" "$root/models/$step" ;;
  learned)
    # NAME: a type of transformers. The models that know what the gates ask
    rm -rf "$root/models/$name"
    PYTHONPATH=$root/program/ci:$root/program/tests/server python candidate "$trained" "$root/models/$name.new" "$root/program/ci/gates" 320 "$name"
    mv "$root/models/$name.new" "$root/models/$name" ;;
  wide)
    # NAME: the hybrid that `learned` made
    rm -rf "$root/models/wide"
    python candidate "$rehearsal/models.py" wide "$root/models/$name" "$root/models/wide" ;;
  heavy)
    # NAME: a model that was trained. With so many weights that a step takes the GPU longer than the processor
    rm -rf "$root/models/heavy-$name"
    python candidate "$rehearsal/models.py" heavy "$root/models/$name" "$root/models/heavy-$name" ;;
  head)
    # A large head, in BF16 and in FP8
    rm -rf "$root/models/head" "$root/models/head-fp8"
    python candidate "$rehearsal/models.py" head "$root/models/trained" "$root/models/head"
    python candidate "$rehearsal/models.py" head-fp8 "$root/models/head" "$root/models/head-fp8" ;;
  slim)
    # NAME: a model. Its copy in FP8
    rm -rf "$root/models/$name-slim"
    python tool -P -m sparkwright model slim "$root/models/$name" --to "$root/models/$name-slim" ;;
  slimming)
    # What slimming takes, against a copy of the same files
    rm -rf "$root/slimming"
    PYTHONPATH=$root/program/ci/bench python tool -P "$root/program/ci/bench/slim.py" "$root/slimming" 24 ;;
  lookup)
    rm -rf "$root/models/lookup"
    python candidate "$rehearsal/lookup.py" "$root/models/lookup" ;;
  effects)
    # NAME: what ci/bench/effects.py measures. WORDS: its options
    own_store
    python tool -P "$root/program/ci/bench/effects.py" "$name" --ours "$environments/candidate/bin/python" --stock "$environments/stock/bin/python" \
      --wheel "$candidate" --baseline "$stock" --model "$root/models/$model" --cache-dir "$store" --output "$root/effects" "${@:5}" ;;
  warm)
    # NAME: a label. What a warm pack saves a server of MODEL, by ci/bench/warm_pack.py. WORDS: its options.
    # A folder warm/NAME beside the kit's script holds the pack of another machine, from which it is started once.
    rm -rf "$root/warm/$name"
    mkdir -p "$root/warm"
    chmod -R a+rX "$root/models/$model"
    options=(--variable VLLM_USE_FLASHINFER_SAMPLER=0 --flag=--max-model-len=4096 --flag=--max-num-seqs=16 --flag=--gpu-memory-utilization=0.4)
    [ ! -e "$root/sites" ] || options+=(--packages "$root/sites")
    if [ "$(id -u)" = 0 ]; then
      id -u rehearsal >&2 || useradd --create-home rehearsal
      if setpriv --reuid=rehearsal --regid=rehearsal --init-groups "$environments/candidate/bin/python" -P "$rehearsal/usable.py"; then
        options+=(--user rehearsal)
      else
        echo "WITHOUT ANOTHER USER, who cannot use the GPU or $root: set REHEARSAL to a folder that it may enter, or chmod o+x those above" >&2
      fi
    fi
    [ ! -e "$root/../kit/warm/$name" ] || options+=(--pack "$root/../kit/warm/$name")
    python tool -P "$root/program/ci/bench/warm_pack.py" --python "$environments/candidate/bin/python" --model "$root/models/$model" \
      --output "$root/warm/$name" --store "$root/store" "${options[@]}" "${@:5}" ;;
  predict)
    # NAME…: models, whose predicted speeds are compared with measured ones
    export VLLM_USE_FLASHINFER_SAMPLER=0
    python tool -P "$root/program/ci/bench/predict.py" measured "${@:3}" --models "$root/models" --python "$environments/candidate/bin/python" \
      --output "$root/predict.json" ;;
  starts)
    # One start of each architecture, without weights
    rm -rf "$root/starts"
    VLLM_USE_FLASHINFER_SAMPLER=0 python candidate "$rehearsal/starts.py" 6 "$root/models/trained" "$root/starts" \
      --enforce-eager --max-model-len=2048 --kv-cache-memory-bytes=2G --gpu-memory-utilization=0.14 \
      '--additional-config={"gdn_prefill_backend":"triton"}' ;;
  nodes)
    # NAME MODEL: a recipe, on two machines that are this one twice. WORDS: further arguments of serve
    rm -rf "$root/nodes"
    python tool -P "$rehearsal/nodes.py" "$root/program" "$environments/candidate/bin/python" "$name" "$root/models/$model" "$root/nodes" "${@:5}" ;;
  owner)
    # NAME MODEL: a recipe. What an owner does with a release, and the canary of a pass of G5, of a night before this or of its own
    canary=$(echo "$root"/dist/*.canary.json)
    if ! grep -qs " $name\"" "$canary"; then
      night candidate "$root/owner" --only G5
      canary=$(echo "$root"/owner/*.canary.json)
    fi
    python candidate "$rehearsal/mutants.py" "$root" scale-4
    python tool -P "$rehearsal/owner.py" "$root" "$environments/candidate" "$environments/scale-4" "$canary" "$name" "$root/models/$model" "${@:5}" ;;
  harness)
    rm -rf "$root"/store/environments/harness-*
    python tool -P "$rehearsal/harness.py" "$root" ;;
  # With a store of its own, as for another profile, a night has its own verdicts, too.
  night) night candidate "$root/${STORE:-dist}" "${@:5}" ;;
  killed)
    # NAME MODEL SECONDS WORDS…: the night, killed after so long, and again to its end
    if LIMIT=$5 night candidate "$root/killed" "${@:6}"; then exit 1; fi
    night candidate "$root/killed" "${@:6}" ;;
  fault)
    # NAME MODEL FAULT WORDS…: the night of a server that is wrong in one way
    python candidate "$rehearsal/mutants.py" "$root" "$5"
    mkdir -p "$root/stores" "$root/mutants/$5"
    # What the night before it recorded of the official wheel is not recorded again.
    [ -e "$root/stores/$5" ] || [ ! -e "$store" ] || cp -a "$store" "$root/stores/$5"
    store=$root/stores/$5
    night "$5" "$root/mutants/$5" "${@:6}" ;;
  serve)
    # As a user does: the recipe's command, health, an answer, and the end
    url=http://127.0.0.1:8123
    python tool -P -m sparkwright serve --root "$root/program" --cache-dir "$store" --python "$environments/candidate/bin/python" \
      --model "$root/models/$model" --port 8123 "$name" &
    server=$!
    for _ in $(seq 120); do
      python tool -P -m sparkwright serve --health "$url" && break
      kill -0 "$server"
      sleep 1
    done
    python tool -P -m sparkwright serve --health "$url"
    python tool -c 'import sys, urllib.request as request
body = b"{\"model\": \"%s\", \"prompt\": \"483>\", \"max_tokens\": 1, \"temperature\": 0}" % sys.argv[2].encode()
print(request.urlopen(request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})).read().decode())' "$url" "$name"
    kill -TERM "$server"
    wait "$server" && echo "ended with status 0" ;;
  *) echo "unknown step $step" >&2; exit 2 ;;
esac
