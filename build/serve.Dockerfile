# The image that serves a release, from a checkout, for the engine's own kind of processor:
#
#   docker build --file build/serve.Dockerfile --build-arg BASE=ubuntu@sha256:DIGEST --build-arg INDEX=https://INDEX/ \
#       --build-arg TRUST=FINGERPRINT --build-arg RELEASE=2026.11.3 --tag NAME .
#
# CHANNEL=candidate takes a release that is not verified. sparkwright's client checks signatures and hashes, and installs below
# /opt/sparkwright; no download stays in a layer.
ARG BASE
FROM ${BASE}
ARG BASE
ARG INDEX
ARG TRUST
ARG RELEASE
ARG CHANNEL=verified
# A tag can name another image tomorrow, and an image shows the password of an address.
RUN case $BASE in *sha256:????????????????????????????????????????????????????????????????) ;; *) \
        echo "BASE is named by no digest: $BASE"; exit 1;; esac; \
    case $INDEX in *@*) echo "the image would show the password of INDEX"; exit 1;; esac; \
    [ -n "$TRUST" ] && [ -n "$RELEASE" ] || { echo "TRUST and RELEASE are required"; exit 1; }
# Triton compiles its launchers with gcc against Python.h, and FlashInfer what is not in its wheel with g++; tini passes signals on and
# reaps what a dead engine leaves. Only what the base lacks is installed: a base that has everything needs no network for it.
ARG PACKAGES="ca-certificates g++ python3 python3-dev python3-venv tini"
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
COPY . /tmp/checkout
RUN set -eu; umask 022; cd /tmp/checkout; export XDG_CACHE_HOME=/tmp/cache PYTHONDONTWRITEBYTECODE=1; \
    prefix=/opt/sparkwright; python3 -m venv $prefix/program; python=$prefix/program/bin/python; \
    install="$python -I -m pip install --quiet --disable-pip-version-check --no-cache-dir"; \
    $install --require-hashes --only-binary :all: --requirement .github/requirements.txt; \
    $install --no-deps --no-build-isolation .; \
    cd /; $python -I -m sparkwright.client.main install --prefix $prefix --index "$INDEX" --trust "$TRUST" \
        --channel "$CHANNEL" --version "$RELEASE"; \
    $python -I -m pip uninstall --quiet --yes pip; \
    $python -I -m compileall -qq -j 0 --invalidation-mode unchecked-hash $prefix >&2 || :; \
    # Kernels that are compiled at run time outlive the container in a volume; all else of the release belongs to root.
    chown -R 10001:10001 $prefix/releases/$RELEASE/caches; \
    install -m 755 /tmp/checkout/build/entrypoint.sh /usr/local/bin/sparkwright-entrypoint; \
    ln -s $prefix/program/bin/sparkwright /usr/local/bin/sparkwright; rm -rf /tmp/checkout /tmp/cache
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
LABEL sparkwright.release=$RELEASE sparkwright.index=$INDEX sparkwright.index.fingerprint=$TRUST \
    org.opencontainers.image.base.digest=$BASE
# Owner, mode and content of a path are those of the image when a new volume is put there.
VOLUME ["/var/lib/sparkwright", "/opt/sparkwright/releases/$RELEASE/caches"]
WORKDIR /var/lib/sparkwright
USER 10001:10001
EXPOSE 8888
STOPSIGNAL SIGTERM
# While it loads, a container is "starting"; a busy server is healthy, one that is dead or stuck is not.
HEALTHCHECK --interval=60s --timeout=60s --start-period=3600s --retries=3 CMD ["/usr/local/bin/sparkwright-entrypoint", "health"]
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/sparkwright-entrypoint"]
CMD ["serve"]
