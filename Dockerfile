# Two variants of one image, chosen by --build-arg VARIANT:
#   docker build -t megackpt .                                on NVIDIA's PyTorch image, with its torch as it is
#   docker build -t megackpt:cpu --build-arg VARIANT=cpu .    on plain Python, with the lock file's torch
# Run it with   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 megackpt bash
# (processes of one node share memory through /dev/shm, and NCCL pins some: hence --ipc and memlock). Several nodes also
# need   --network host --device /dev/infiniband   and results outlive the container with   -v DIR:/runs   where DIR may
# be written by user 10001, or by the one whom --user "$(id -u)" names. The repository is in /opt/megackpt:
#   bash /opt/megackpt/examples/quickstart.sh --no-install --out /runs/quickstart
ARG VARIANT=gpu
ARG GPU_BASE=nvcr.io/nvidia/pytorch:26.05-py3
ARG CPU_BASE=python:3.11-slim-bookworm

FROM ${GPU_BASE} AS gpu
COPY requirements.lock /tmp/requirements.lock
# torch, numpy and what they need come with the image, built for its CUDA: --no-deps leaves them alone, and the
# comparison makes sure of it. What else is there stays too, and only what is missing is installed: the image pins all
# that it was made with in a file that PIP_CONSTRAINT names, and pip refuses other versions.
RUN python -c 'import torch; print(torch.__version__)' > /tmp/torch-of-image \
    && grep -E '^(PyYAML|regex|safetensors|sentencepiece|tiktoken|tokenizers|zstandard)==' /tmp/requirements.lock > /tmp/pins \
    && while read -r pin; do pip show --quiet "${pin%%==*}" || echo "$pin"; done < /tmp/pins > /tmp/requirements.txt \
    && PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps -r /tmp/requirements.txt \
    && test "$(python -c 'import torch; print(torch.__version__)')" = "$(cat /tmp/torch-of-image)"

FROM ${CPU_BASE} AS cpu
# The default torch wheel brings CUDA libraries along; give the index of CPU-only wheels to leave them out:
# --build-arg PIP_EXTRA_INDEX_URL=... (pip reads the variable itself).
ARG PIP_EXTRA_INDEX_URL=
COPY requirements.lock /tmp/requirements.lock
RUN pip install --no-cache-dir -r /tmp/requirements.lock

# hadolint ignore=DL3006
FROM ${VARIANT}
WORKDIR /opt/megackpt
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --create-home --uid 10001 megackpt \
    && mkdir /runs \
    && chown megackpt /runs
USER 10001
WORKDIR /runs
HEALTHCHECK NONE
CMD ["megackpt", "--help"]
