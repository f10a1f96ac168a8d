#!/usr/bin/env bash
# Start vLLM servers on GPUs of this machine, one a GPU, with what weight syncing needs; their ports are 8000, 8001, …
#
#     scripts/vllm_gpus.sh 0,1,2,3 Qwen/Qwen3-4B [any option of `vllm serve`]
#
# They are reachable from this machine only, unless LZE_VLLM_HOST names another address. VLLM is the `vllm` command; without it,
# that of .venv-gpu here, or else of the PATH. Each writes a log, vllm-HOST-PORT.log. If one ends, its log's end is shown, and the
# others stay, for the trainer goes on with them. To stop them all: Ctrl-C.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    echo "scripts/vllm_gpus.sh: give GPUs and a model, such as: scripts/vllm_gpus.sh 0,1,2,3 Qwen/Qwen3-4B" >&2
    exit 1
fi
host=${LZE_VLLM_HOST:-127.0.0.1}  # not HOST, which some shells and environments set to the machine's own name
vllm=${VLLM:-.venv-gpu/bin/vllm}
[[ -n ${VLLM:-} || -x $vllm ]] || vllm=vllm
if ! command -v "$vllm" >/dev/null; then
    echo "scripts/vllm_gpus.sh: there is no command \`$vllm\`. Install vLLM, or name its command: VLLM=/path/to/vllm" >&2
    exit 1
fi

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
port=8000
logs=()  # by process id
for gpu in ${1//,/ }; do
    log=vllm-$host-$port.log
    # Weight reloading is one of vLLM's development endpoints; they load from any path, for anyone who reaches them. With
    # `--enable-lora`, adapters are loaded while it runs
    CUDA_VISIBLE_DEVICES=$gpu VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "$vllm" serve "$2" --host "$host" --port "$port" \
        --logprobs-mode processed_logprobs --max-logprobs -1 "${@:3}" >"$log" 2>&1 &
    logs[$!]=$log
    echo "http://$host:$port: GPU $gpu, log in $log"
    port=$((port + 1))
done

# A server ends by itself only if something is wrong
while ((${#logs[@]})); do
    wait -n || true
    for pid in "${!logs[@]}"; do
        if ! kill -0 "$pid" 2>/dev/null; then
            status=0
            wait "$pid" || status=$?
            echo "scripts/vllm_gpus.sh: a server has ended with $status. Its log ${logs[$pid]} ends with:" >&2
            tail -n 20 "${logs[$pid]}" >&2
            unset "logs[$pid]"
        fi
    done
done
echo "scripts/vllm_gpus.sh: no server is left." >&2
exit 1
