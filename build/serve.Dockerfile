# The image that serves a release: `sparkwright lab image` builds it. BASE is pinned by digest: `image` in
# build/<stack>/environment.yaml, or --base. RELEASE is the first stage with the release NAME installed below /opt/sparkwright, which
# sparkwright's client does in a container: the wheels lie in a volume there, and so in no layer and no build context.
ARG BASE
ARG RELEASE=serve-system

FROM ${BASE} AS serve-system
# Triton compiles its launchers with gcc against Python.h, and FlashInfer what is not in its wheel with g++; tini passes signals on and
# reaps what a dead engine leaves.
ARG PACKAGES="ca-certificates g++ python3 python3-dev python3-venv tini"
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
    fi; \
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the Python of the base is older than 3.11")'
# No login, no password: a name for the number that everything inside runs as.
RUN set -eu; echo 'spark:x:10001:' >> /etc/group; echo 'spark:x:10001:10001::/var/lib/sparkwright:/bin/bash' >> /etc/passwd; \
    mkdir -p /var/lib/sparkwright/huggingface; chown -R 10001:10001 /var/lib/sparkwright

FROM ${RELEASE} AS serve
ARG NAME
COPY entrypoint.sh /usr/local/bin/sparkwright-entrypoint
# Kernels that are compiled at run time outlive the container in a volume; all else of the release belongs to root.
RUN set -eu; chown -R 10001:10001 /opt/sparkwright/releases/$NAME/caches; \
    ln -s /opt/sparkwright/program/bin/sparkwright /usr/local/bin/sparkwright
ENV SPARKWRIGHT_PREFIX=/opt/sparkwright \
    HOME=/var/lib/sparkwright \
    HF_HOME=/var/lib/sparkwright/huggingface \
    SPARKWRIGHT_CACHE_DIR=/var/lib/sparkwright/cache \
    HOST=0.0.0.0 \
    PORT=8888 \
    LC_ALL=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Owner, mode and content of a path are those of the image when a new volume is put there.
VOLUME ["/var/lib/sparkwright", "/opt/sparkwright/releases/$NAME/caches"]
WORKDIR /var/lib/sparkwright
USER 10001:10001
EXPOSE 8888
STOPSIGNAL SIGTERM
# While it loads, a container is "starting"; a busy server is healthy, one that is dead or stuck is not.
HEALTHCHECK --interval=60s --timeout=60s --start-period=3600s --retries=3 CMD ["/usr/local/bin/sparkwright-entrypoint", "health"]
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/sparkwright-entrypoint"]
CMD ["serve"]
