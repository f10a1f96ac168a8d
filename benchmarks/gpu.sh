#!/usr/bin/env bash
# The update phase against TRL's own on one GPU: a Qwen2 model of 0.3 G weights made on the spot, bfloat16, completions
# up to 4,096 tokens. Stops after 8 minutes, needs no network, and is meant for a GPU with 40 GB or more.
#
#   benchmarks/gpu.sh [DIR]        PYTHON=… chooses the interpreter; default: .venv/bin/python if it exists, else python
#
# Writes DIR/DEVICE/update.json and update.md (DIR: runs/gpu by default), DEVICE being the name of the GPU. Without a GPU
# something tiny runs instead, to see that the script works: its numbers mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
output=${1:-runs/gpu}
export HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
flags=()
if [ -z "$device" ]; then
	echo "No GPU: something tiny runs on the CPU, and its numbers mean nothing." >&2
	device=CPU
	flags=(--quick)
fi
timeout 480 "$python" -m benchmarks.parts update "${flags[@]}" --output "$output/${device// /-}"
