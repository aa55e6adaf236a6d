#!/usr/bin/env bash
# Collect the wheels that lenience needs on a machine with Python 3.12, PyTorch, transformers,
# scikit-learn, safetensors and pydantic, but without a package index:
#
#   tools/gpu_wheels.sh wheels
#
# and there: pip install --no-index --find-links wheels --no-deps wheels/*.whl
set -euo pipefail
out=${1:?usage: tools/gpu_wheels.sh FOLDER}
cd "$(dirname "$0")/.."
wanted=(cyclopts docstring-parser rich-rst docutils attrs rich markdown-it-py mdurl pygments
  filelock jinja2 markupsafe)
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
  -c constraints.txt -d "$out" "${wanted[@]}"
python3 -m pip wheel -q --no-deps -w "$out" .
du -sh "$out"
