#!/usr/bin/env bash
# install.sh VENV: vLLM 0.32 for CPUs in a virtual environment of its own (Python 3.11; about 80 s, 2.5 GB).
# The lock leaves out torchvision, torchaudio and torchcodec, which break the import beside a CPU build of torch, and triton,
# which a CPU does not use; so nothing is resolved here.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:?usage: install.sh VENV}
shim=$(mktemp -d) # pip builds in place
trap 'rm -rf "$shim"' EXIT
cp -r "$here/shim/." "$shim"

python3.11 -m venv "$venv"
"$venv/bin/pip" install -q --no-deps -r "$here/cpu.lock"
"$venv/bin/pip" install -q --no-deps setuptools==78.1.1
"$venv/bin/pip" install -q --no-deps --no-build-isolation "$shim"
"$venv/bin/vllm" --version
