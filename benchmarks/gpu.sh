#!/usr/bin/env bash
# Measurements on one GPU, each within ten minutes and without a network.
#
#   benchmarks/gpu.sh [DIR]                   the update phase against TRL's own: a Qwen2 model of 0.3 G weights made on
#                                             the spot, bfloat16, completions up to 4,096 tokens; 40 GB or more
#   benchmarks/gpu.sh DIR TASK [FLAG ...]     GRPO of SmolLM2-135M on `words`, `few_words`, `skills` or `count` by baseline, exact and
#                                             the gate; flags are those of `python -m benchmarks`.
#                                             Runs that are not finished in time begin again: call it once more
#
# PYTHON=… chooses the interpreter; default: .venv/bin/python if it exists, else python. The update phase is written to
# DIR/DEVICE/update.json and update.md, the others to DIR/DEVICE/TASK (DIR: runs/gpu by default), DEVICE being the name
# of the GPU. SECONDS_LEFT=… ends the runs earlier than after 590 s. Without a GPU something tiny runs instead, to see
# that the script works: its numbers mean nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
output=${1:-runs/gpu}
task=${2:-update}
export HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
flags=(--steps 40)  # a CPU makes 12 in half an hour
quick=()
if [ -z "$device" ]; then
	echo "No GPU: something tiny runs on the CPU, and its numbers mean nothing." >&2
	device=CPU
	flags=(--quick)
	quick=(--quick)
fi
output=$output/${device// /-}
case $task in
update)
	timeout 480 "$python" -m benchmarks.parts update "${quick[@]}" --output "$output"
	;;
words | few_words | skills | count)
	status=0
	timeout "${SECONDS_LEFT:-590}" "$python" -m benchmarks --task "$task" "${flags[@]}" --strategies exact gate_g4 \
		--seeds 0 --output "$output/$task" "${@:3}" || status=$?
	if ((status == 124)); then
		echo "not finished: call it once more" >&2
	fi
	exit $status
	;;
*)
	echo "error: the second argument must be update, words, few_words, skills or count, got '$task'." >&2
	exit 2
	;;
esac
