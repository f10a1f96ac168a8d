#!/usr/bin/env bash
# Start a vLLM server on this machine's CPU, reachable from this machine only, with what weight syncing needs.
#
#     scripts/vllm_serve.sh --model DIR [--port 8000] [any other option of vLLM]
#
# Options given here win over the defaults below. On GPUs: scripts/vllm_gpus.sh (docs/vllm.md).
set -euo pipefail
venv=${VLLM_VENV:-$(dirname "$0")/../.venv-vllm}

if [ ! -x "$venv/bin/python" ]; then
    echo "scripts/vllm_serve.sh: no vLLM environment at $venv. Make it with: make vllm-env" >&2
    exit 1
fi
case " $* " in
    *" --model "* | *" --model="*) ;;
    *)
        echo "scripts/vllm_serve.sh: --model DIR is required: a model with its tokenizer, as save_pretrained writes it" >&2
        exit 1
        ;;
esac

# Weight reloading is one of vLLM's development endpoints; they are for trusted machines, hence the loopback address
export VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1  # the latter with `--enable-lora`
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} VLLM_NO_USAGE_STATS=1
# A prompt is prefilled whole: on a CPU, a request with a seed of its own whose prompt is prefilled in chunks ends the
# engine ("CPU Generator does not use offset"). The batch of a prefill is then at least as long as the context by itself.
# With the usual blocks of 128 tokens, the completions of a group would each prefill their prompt again, unless it is longer.
# And with a worker process of its own, the engine spins on a core while it waits for it: on two cores, half of them.
export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
# The `vllm` command looks for a distribution of that name, which the CPU build is not
exec "$venv/bin/python" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port 8000 \
    --dtype float32 --enforce-eager --logprobs-mode processed_logprobs --max-logprobs -1 \
    --no-enable-chunked-prefill --block-size 32 --distributed-executor-backend uni "$@"
