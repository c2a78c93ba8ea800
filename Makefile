# Every target creates .venv and installs what is missing; a change of the dependencies reinstalls.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two levels: what the commands need, and what the tests need besides. torch_tpu is only in the second: installed on a
# machine without a TPU, it makes every plain `import torch` look for one (docs/embeddings.md).
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.installed-all
# One resolver run: the stub satisfies TorchRec's requirement of `fbgemm-gpu` (see packaging/).
STUB := -c packaging/constraints.txt ./packaging/fbgemm-gpu-stub

.PHONY: demo test lint bench install install-all clean system-packages

install: $(INSTALLED)
install-all: $(TEST_INSTALLED)

$(INSTALLED): pyproject.toml packaging/constraints.txt packaging/fbgemm-gpu-stub/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): 2 GB, several minutes and no output until it is done.'
	$(BIN)/pip install --quiet $(STUB) -e '.[ray]'
	$(BIN)/pip check
	touch $@

$(TEST_INSTALLED): pyproject.toml packaging/constraints.txt packaging/fbgemm-gpu-stub/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV), tests and TPU compiler included: 3.4 GB, several minutes and no output until it is done.'
	$(BIN)/pip install --quiet $(STUB) -e '.[all]'
	$(BIN)/pip check
	touch $@ $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m examples.dlrm

test: $(TEST_INSTALLED)
	$(BIN)/python -m tests.tiers $(TIERS)

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: $(TEST_INSTALLED)
	$(BIN)/python -m benchmarks.training

clean:
	rm -rf build dist *.egg-info

# Debian packages that some test tiers use (browser, emulated); those tiers are skipped, with the reason, without them.
system-packages:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v gcc >/dev/null || \
		(apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver gcc libc6-dev)
