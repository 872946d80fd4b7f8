# The router: no torch, no UCX, no Ray. Build from the repository's root:
#   docker build -f helm/containers/router.Dockerfile -t prefixfleet/router:0.1.0 .
# BASE may name a mirror or a digest (python@sha256:...).
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY . .
RUN python -m venv /opt/prefixfleet \
    && /opt/prefixfleet/bin/pip install --no-cache-dir --disable-pip-version-check '.[otel]' \
    && /opt/prefixfleet/bin/prefixfleet-router --help >/dev/null

FROM ${BASE}
COPY --from=build /opt/prefixfleet /opt/prefixfleet
ENV PATH=/opt/prefixfleet/bin:$PATH PYTHONUNBUFFERED=1 PREFIXFLEET_ROUTER_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
CMD ["prefixfleet-router"]
