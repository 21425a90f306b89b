#!/bin/bash
# rehearse.sh ROOT STEP [NAME MODEL [PROFILE]]: one step of the rehearsal of STACK (9.0a.yaml: 2026.06), in the unpacked bundle ROOT
set -eu
export STACK=${STACK:-2026.06}
root=$1 step=$2 name=${3:-} model=${4:-} profile=${5:-learnt}
rehearsal=$root/program/ci/rehearsal environments=$root/environments
store=$root/store
candidate=$(ls "$root"/dist/*.whl) stock=$(ls "$root"/stock/*.whl)
python() { "$environments/$1/bin/python" "${@:2}"; }
gate() {
  python tool -P -m sparkwright gate --root "$root/program" --stack "$STACK" --arch 9.0a --offline --cache-dir "$store" "$@"
}
# served ENVIRONMENT: from where which model is served, and how
served() { echo --python "$environments/$1/bin/python" --serve "$root/models/$model" --recipe "$(recipe)"; }
recipe() { test -f "$root/program/ci/recipes/layers-$name.yaml" && echo "layers-$name" || echo "rehearsal-$name"; }
against=(--against "$root/reference/$name" --task largest --profile "$profile")
fast=(--preheat 10)
# What the recipe rehearsal-bf16 gives to vLLM, without its contract, which a server without graphs breaks
plain=(
  '--flag=--compilation-config={"mode":0,"cudagraph_mode":"FULL","cudagraph_capture_sizes":[1,2,4,8,16]}'
  --flag=--max-model-len=8192 --flag=--max-num-seqs=16 --flag=--gpu-memory-utilization=0.1 --flag=--kv-cache-memory-bytes=1073741824
  --variable VLLM_USE_FLASHINFER_SAMPLER=0
)
# Negatives run at the same time, with logs of their own
case $step in backend | byte | scale | cache | template | compiled) store=$root/mutants/$step/store ;; stock-soak) store=$root/recorded/$name/store ;; esac
case $step in
  nvfp4 | moe | dense)
    rm -rf "$root/models/$step"
    python candidate "$rehearsal/models.py" "$step" "$root/models/trained" "$root/models/$step" ;;
  qwen3-next | nemotron-h | gpt-oss | gemma-4)
    rm -rf "$root/models/$step"
    python candidate "$rehearsal/architectures.py" "$step" "$root/models/trained" "$root/models/$step" ;;
  harness)
    rm -rf "$store"/environments/harness-*
    python tool -P "$rehearsal/harness.py" "$root" ;;
  mutants)
    for kind in scale cache byte eager; do
      rm -rf "${environments:?}/$kind" "${root:?}/mutants/$kind"
      python candidate "$rehearsal/mutants.py" "$root" "$kind"
    done
    rm -rf "$root/models/template"
    cp -r "$root/models/trained" "$root/models/template"
    # The word of the user is left out of the prompt
    sed -i 's/{{ message.content }}//' "$root/models/template/tokenizer_config.json" ;;
  operators) gate "$candidate" --output "$root/dist" --only G2 --python "$environments/candidate/bin/python" ;;
  record)
    # shellcheck disable=SC2046
    gate "$stock" --output "$root/recorded" $(served stock) --task largest --record "$root/reference/$name" ;;
  ladder)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/dist" --keep-going --only G3 --only G4 --only G5 --only G6 $(served candidate) "${against[@]}" ;;
  layers)
    # Random numbers know no answers: what the wheel computes is compared with what the official wheel does
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/dist" --keep-going --only G3 --only G5 $(served candidate) "${against[@]}" ;;
  compiled)
    gate "$candidate" --output "$root/compiled" --only G3 --python "$environments/candidate/bin/python" --serve "$root/models/$model" \
      --recipe compiled-dense ;;
  backend)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/mutants/backend" --only G3 $(served candidate) --flag=--attention-backend=TRITON_ATTN ;;
  template)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/mutants/template" --only G4 $(served candidate) --profile "$profile" ;;
  soak)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/dist" --only G7 $(served candidate) "${against[@]}" ;;
  stock-soak)
    # Whose fault it is if the candidate's soak fails
    # shellcheck disable=SC2046
    gate "$stock" --output "$root/recorded" --only G7 $(served stock) "${against[@]}" ;;
  byte)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/mutants/byte" --only G3 $(served byte) ;;
  scale | cache)
    wheel=$(ls "$root/mutants/$step"/*.whl)
    # shellcheck disable=SC2046
    gate "$wheel" --output "$root/mutants/$step" --only G5 $(served "$step") "${against[@]}" ;;
  eager)
    gate "$candidate" --output "$root/mutants/eager" --only G8 --python "$environments/eager/bin/python" --serve "$root/models/dense" \
      --baseline "$candidate" --baseline-python "$environments/candidate/bin/python" --workload rehearsal "${fast[@]}" "${plain[@]}" ;;
  equal)
    # shellcheck disable=SC2046
    gate "$candidate" --output "$root/dist" --only G8 $(served candidate) \
      --baseline "$stock" --baseline-python "$environments/stock/bin/python" "${fast[@]}" ;;
  serve)
    # As a user does: the recipe's command, health, an answer, and the end
    url=http://127.0.0.1:8123
    python tool -P -m sparkwright serve --root "$root/program" --cache-dir "$store" --python "$environments/candidate/bin/python" \
      --model "$root/models/$model" --port 8123 "rehearsal-$name" &
    server=$!
    for _ in $(seq 120); do
      python tool -P -m sparkwright serve --health "$url" && break
      kill -0 "$server"
      sleep 1
    done
    python tool -P -m sparkwright serve --health "$url"
    python tool -c 'import sys, urllib.request as request
body = b"{\"model\": \"%s\", \"prompt\": \"483>\", \"max_tokens\": 1, \"temperature\": 0}" % sys.argv[2].encode()
print(request.urlopen(request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})).read().decode())' "$url" "rehearsal-$name"
    kill -TERM "$server"
    wait "$server" && echo "ended with status 0" ;;
  *) echo "unknown step $step" >&2; exit 2 ;;
esac
