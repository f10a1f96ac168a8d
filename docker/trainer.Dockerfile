# The trainer, at the versions of constraints.txt. From the root of the repository:
#
#     docker build -f docker/trainer.Dockerfile -t lze-trl .
#     docker run --gpus all --network host --shm-size 16g -v "$PWD/runs:/work/runs" lze-trl train recipes/demo/lze.yaml
FROM python:3.11-slim-bookworm
# DeepSpeed and Triton compile at run time
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY setup.cfg pyproject.toml README.md LICENSE constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY lze_trl lze_trl
RUN pip install --no-cache-dir -c constraints.txt '.[app,deepspeed,tracking]'
COPY recipes recipes
COPY accelerate_configs accelerate_configs
ENTRYPOINT ["lze-trl"]
CMD ["--help"]
