# The image of every pod: gptddp.launch under tini, as an unprivileged user, on a root file system
# that may be read-only. `make image` builds it; image/build lists the arguments.
ARG BASE_IMAGE=python:3.12-slim-bookworm

# -- our code, as a wheel unpacked into /opt/gptddp ------------------------------------------------
FROM ${BASE_IMAGE} AS code
COPY image/constraints.txt pyproject.toml README.md LICENSE /src/
RUN python3 -m venv --without-pip /opt/venv \
 && python3 -m venv /tmp/tools \
 && /tmp/tools/bin/pip install --no-cache-dir -q -c /src/constraints.txt uv
COPY gptddp /src/gptddp
# The scripts must name the interpreter of the image below, which has the same path.
RUN /tmp/tools/bin/uv pip install -q --python /opt/venv/bin/python --target /opt/gptddp --no-deps \
      --no-cache --compile-bytecode --build-constraints /src/constraints.txt /src \
 && rm -f /opt/gptddp/.lock

# -- the image: packages, which rarely change, then our code in the last layer ---------------------
FROM ${BASE_IMAGE}
RUN command -v tini >/dev/null \
 || { apt-get update -q && apt-get install -qy --no-install-recommends tini && rm -rf /var/lib/apt/lists/*; }
# cuda: the build on PyPI (CUDA 13.2), which also runs on CPUs; cpu: a build of a fifth of its size.
ARG TORCH=cuda
# additional extras of pyproject.toml, such as wandb,trackio
ARG EXTRAS=
COPY image/constraints.txt pyproject.toml /tmp/build/
# uv is gone at the end of the layer. Byte-compiled: on a read-only root every start would compile.
RUN python3 -m venv --without-pip /opt/venv \
 && python3 -m venv /tmp/tools \
 && /tmp/tools/bin/pip install --no-cache-dir -q -c /tmp/build/constraints.txt uv \
 && if [ "$TORCH" = cpu ]; then export UV_TORCH_BACKEND=cpu; \
    elif [ "$TORCH" != cuda ]; then echo "TORCH is '$TORCH': it must be cuda or cpu" >&2; exit 2; fi \
 && /tmp/tools/bin/uv pip install -q --python /opt/venv/bin/python --no-cache --compile-bytecode \
      -r /tmp/build/pyproject.toml $(printf -- '--extra %s ' train $(echo "$EXTRAS" | tr , ' ')) -c /tmp/build/constraints.txt \
 && /opt/venv/bin/python -c "import site; print('/opt/gptddp', file=open(site.getsitepackages()[0] + '/gptddp.pth', 'w'))" \
 && rm -rf /tmp/tools /tmp/build \
 && echo "gptddp:x:1000:1000:gptddp:/tmp:/usr/sbin/nologin" >>/etc/passwd \
 && echo "gptddp:x:1000:" >>/etc/group
ENV PATH=/opt/gptddp/bin:/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=code /opt/gptddp /opt/gptddp
COPY examples /opt/examples
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title=gptddp \
      org.opencontainers.image.description="Pre-trains GPT language models with PyTorch DDP on Kubernetes" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION}
# A number: Kubernetes can check runAsNonRoot only for a numeric user.
USER 1000:1000
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "python", "-m", "gptddp.launch"]
