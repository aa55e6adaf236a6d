# Everything runs in .venv, which the README's test command makes.
BIN := .venv/bin

check: lint types test   ## what CI runs

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

test:
	$(BIN)/pytest -n 2

.PHONY: check lint types test
