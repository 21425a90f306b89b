# The image in which `sparkwright build --container` builds. sparkwright writes the folder wheels/ beside this file when it builds it.
# BASE is pinned by digest: `image` in build/<stack>/environment.yaml, or --base.
ARG BASE
FROM ${BASE} AS system
# nvcc drives g++; extension modules are compiled against Python.h; git holds the sources.
ARG PACKAGES="ca-certificates ccache g++ git python3 python3-dev python3-venv"
# Only what the base lacks is installed: a base that has everything needs no network. One stream keeps the order of its messages.
RUN exec 2>&1; set -eu; missing=; \
    for package in $PACKAGES; do \
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing="$missing $package"; \
    done; \
    if [ -n "$missing" ]; then \
        export DEBIAN_FRONTEND=noninteractive; \
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } \
            || { echo "the base lacks, and could not install:$missing"; exit 1; }; \
        rm -rf /var/lib/apt/lists/*; \
    fi

FROM system AS builder
COPY wheels /usr/local/lib/sparkwright/wheels
# No index: what is installed lies in that folder, verified by hash before it came there.
RUN set -eu; place=/usr/local/lib/sparkwright; python3 -m venv $place; \
    $place/bin/python -m pip install --quiet --disable-pip-version-check --no-index --find-links $place/wheels sparkwright; \
    rm -r $place/wheels; $place/bin/sparkwright --version
