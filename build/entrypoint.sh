#!/bin/sh
# What a container of the serving image runs: one of the commands below, in this process's place, so that signals reach it.
# Arguments and variables are handed on as they came; the variables are read, and checked, by `sparkwright serve --environment`.
set -eu

program=/opt/sparkwright/program/bin/python

commands() {
    cat >&2 <<'TEXT'
commands:
  serve [RECIPE] [OPTION...]       serve a recipe or $MODEL (default)
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
    run "$program" -P -m sparkwright serve "$@"
}

command=${1-serve}
[ $# -eq 0 ] || shift

case $command in
    serve) serve --environment "$@" ;;
    health) serve --environment --health "$@" ;;
    bash) run /bin/bash "$@" ;;
    help | --help | -h) commands ;;
    *)
        echo "$command: no such command" >&2
        commands
        exit 2
        ;;
esac
