#!/bin/sh
# What a container of the serving image runs: one of the commands below, in this process's place, so that signals reach it.
# Arguments are handed on as they came; HOST and PORT say where the server listens, and where `health` looks for it.
set -eu

program=/opt/sparkwright/program/bin/python

commands() {
    cat >&2 <<'TEXT'
commands:
  serve [RECIPE] [OPTION...]       serve a recipe, or the model of --model (default)
  health [OPTION...]               is the server of this container alive?
  bash [ARGUMENT...]               a shell with the release's programs first in PATH
TEXT
}

# The client sets PATH, VIRTUAL_ENV and the caches of the release for the program that it becomes.
# -P: a folder named sparkwright in the working directory must not be taken for the program.
run() {
    exec "$program" -P -m sparkwright.client.main run -- "$@"
}

serve() {
    run "$program" -P -m sparkwright serve --host "${HOST:-0.0.0.0}" --port "${PORT:-8888}" "$@"
}

command=${1-serve}
[ $# -eq 0 ] || shift

case $command in
    serve) serve "$@" ;;
    health) serve --health "$@" ;;
    bash) run /bin/bash "$@" ;;
    help | --help | -h) commands ;;
    *)
        echo "$command: no such command" >&2
        commands
        exit 2
        ;;
esac
