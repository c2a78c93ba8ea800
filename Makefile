# Every target creates .venv and installs what is missing; a change of the dependencies reinstalls.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# One resolver run: the stub satisfies TorchRec's requirement of `fbgemm-gpu` (see packaging/).
PACKAGES := -c packaging/constraints.txt -e '.[all]' ./packaging/fbgemm-gpu-stub

.PHONY: demo test lint bench install clean system-packages

install: $(INSTALLED)

$(INSTALLED): pyproject.toml packaging/constraints.txt packaging/fbgemm-gpu-stub/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): 3.4 GB, several minutes and no output until it is done.'
	$(BIN)/pip install --quiet $(PACKAGES)
	$(BIN)/pip check
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m examples.dlrm

test: $(INSTALLED)
	$(BIN)/python -m tests.tiers

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.training

clean:
	rm -rf build dist *.egg-info

# Debian packages that some test tiers use (browser, emulated); those tiers are skipped, with the reason, without them.
system-packages:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v gcc >/dev/null || \
		(apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver gcc libc6-dev)
