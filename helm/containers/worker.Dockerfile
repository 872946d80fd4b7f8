# Head and workers with NVIDIA GPUs: vLLM, Ray, node daemon, and a UCX with RDMA, which PyPI's
# lacks. Build from the repository's root:
#   docker build -f helm/containers/worker.Dockerfile -t prefixfleet/worker:0.1.0 .
# BASE and CUDA may name mirrors or digests.
ARG BASE=vllm/vllm-openai:v0.32.0
ARG CUDA=nvidia/cuda:12.8.1-devel-ubuntu22.04

FROM ${CUDA} AS ucx
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG UCX_TAG=v1.21.0
ARG UCX_COMMIT=b6a9d47fccce849c28111f05a7fa8f1c930ff17d
RUN apt-get update && apt-get install -y --no-install-recommends \
        autoconf automake ca-certificates git libibverbs-dev libnuma-dev librdmacm-dev libtool \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /ucx
RUN git clone --depth 1 --branch "$UCX_TAG" https://github.com/openucx/ucx . \
    && test "$(git rev-parse HEAD)" = "$UCX_COMMIT" \
    && ./autogen.sh \
    && ./contrib/configure-release --prefix=/opt/ucx --enable-mt --with-verbs --with-rdmacm \
        --with-cuda=/usr/local/cuda --without-go --without-java \
    && make -j "$(nproc)" install

FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
USER 0:0
# KubeRay's probes call wget
RUN apt-get update && apt-get install -y --no-install-recommends \
        ibverbs-providers libibverbs1 libnuma1 librdmacm1 rdma-core wget \
    && rm -rf /var/lib/apt/lists/*
COPY --from=ucx /opt/ucx /opt/ucx
ENV LD_LIBRARY_PATH=/opt/ucx/lib:$LD_LIBRARY_PATH PATH=/opt/ucx/bin:$PATH \
    RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true PYTHONUNBUFFERED=1 HOME=/home/prefixfleet
WORKDIR /src
COPY . .
# the torch and vLLM of the base image stay as they are
RUN python3 -m pip freeze --exclude-editable | grep -E '^(torch|vllm)' >/tmp/base.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/base.txt '.[fleet,ucx]' \
    && python3 -c 'import ray, torch, ucxx, vllm, prefixfleet.cluster' \
    && prefixfleet --help >/dev/null \
    && test -e /opt/ucx/lib/ucx/libuct_ib.so \
    && install -d -o 10001 -g 10001 /home/prefixfleet
WORKDIR /home/prefixfleet
USER 10001:10001
# healthy: the Ray node in this container is
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["wget", "-q", "-O", "-", "http://127.0.0.1:52365/api/local_raylet_healthz"]
ENTRYPOINT []
CMD ["ray", "start", "--head", "--block", "--port=6380", "--disable-usage-stats"]
