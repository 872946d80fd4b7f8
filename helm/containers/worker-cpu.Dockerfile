# Head and workers without GPUs, for trying things out: the CPU build of vLLM, installed by the very
# script that `make setup` runs. Build from the repository's root:
#   docker build -f helm/containers/worker-cpu.Dockerfile -t prefixfleet/worker-cpu:0.1.0 .
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# KubeRay's probes call wget; the CPU engine compiles small kernels as it starts
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/prefixfleet
COPY . .
RUN VENV=/opt/prefixfleet/.venv PIP_NO_CACHE_DIR=1 .ci/setup \
    && .venv/bin/prefixfleet --help >/dev/null \
    && install -d -o 10001 -g 10001 /home/prefixfleet
ENV PATH=/opt/prefixfleet/.venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/prefixfleet
WORKDIR /home/prefixfleet
USER 10001:10001
# healthy: the Ray node in this container is
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["wget", "-q", "-O", "-", "http://127.0.0.1:52365/api/local_raylet_healthz"]
CMD ["ray", "start", "--head", "--block", "--port=6380", "--disable-usage-stats"]
