# A vLLM server that takes weights from the trainer. From the root of the repository:
#
#     docker build -f docker/vllm.Dockerfile --target cpu -t lze-vllm-cpu .
#     docker run --network host --ipc host -v /path/to/model:/model:ro lze-vllm-cpu --model /model
#     docker build -f docker/vllm.Dockerfile --target gpu -t lze-vllm-gpu .
#     docker run --gpus all --network host --ipc host lze-vllm-gpu 0,1 Qwen/Qwen2.5-Math-1.5B --max-model-len 4096
#
# The host's network, because servers listen on 127.0.0.1: they load weights for anyone who reaches them (SECURITY.md). The host's
# /dev/shm, because weights go through it; or give trainer and server a `sync_dir` of `vllm_server_kwargs` at the same path.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /work

FROM base AS cpu
COPY constraints-vllm.txt ./
COPY scripts/vllm_cpu_env.sh scripts/vllm_serve.sh scripts/
RUN scripts/vllm_cpu_env.sh
ENTRYPOINT ["scripts/vllm_serve.sh"]

FROM base AS gpu
RUN pip install --no-cache-dir 'vllm>=0.32'
COPY scripts/vllm_gpus.sh scripts/
ENTRYPOINT ["scripts/vllm_gpus.sh"]
