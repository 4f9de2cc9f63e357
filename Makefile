# The commands that a person types; `make help` lists them. They need Python 3.11 to 3.13, and to install, a network.

PYTHON ?= python3
BIN := .venv/bin
CHAPTERS ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-site test-matrix lab docs workshop translations checkpoints lock outdated audit publish tpu-report clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Installs again whenever the lock or the project's own metadata changes, and never otherwise.
.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -m tools.check_python
	@echo "Creating .venv and installing the locked packages (once; it downloads about 1 GB) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m tools.install
	@touch $@
	@echo "Installed."

run: .venv/installed  ## execute the chapters, and show their pictures on a page (CHAPTERS=notebooks/04_*.ipynb for some)
	@$(BIN)/python -m tools.run_chapters $(CHAPTERS)

test: .venv/installed  ## check the code and the notebooks, and run the tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest

test-site: .venv/installed  ## build the site, and look at it and at JupyterLab in a browser
	@$(BIN)/python -m pytest --site

test-matrix: .venv/installed  ## execute chapters on Colab's packages, another Python and the newest packages, and test them
	@$(BIN)/python -m pytest --matrix tests/test_execution.py

lab: .venv/installed  ## open the chapters in JupyterLab
	@$(BIN)/jupyter lab notebooks

docs: .venv/installed  ## build the site from executed chapters, into build/site/html
	@$(BIN)/python -m tools.build_site

workshop: .venv/installed  ## write the student set and the instructor set, into build/workshop (ARGS='--language zh-CN')
	@$(BIN)/python -m tools.workshop $(ARGS)

translations: .venv/installed  ## renew the Chinese edition, and list what to translate (CHAPTERS=notebooks/08_*.ipynb starts one)
	@$(BIN)/python -m tools.translations $(CHAPTERS)

# Training needs PyTorch, which nothing else here does, so it has an environment of its own.
.venv-train/installed: requirements.lock pyproject.toml
	@$(PYTHON) -m tools.check_python
	@echo "Creating .venv-train with PyTorch (a few minutes, once) ..."
	@$(PYTHON) -m venv .venv-train
	@.venv-train/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@.venv-train/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[train]'
	@touch $@

checkpoints: .venv-train/installed  ## train the bundled checkpoints anew (half a day on 2 cores; ARGS=--compile is faster; resumable)
	@.venv-train/bin/python -m training $(ARGS)

lock: .venv/installed  ## write the locks and environment.yml anew from pyproject.toml
	@$(BIN)/python -m tools.lock

outdated: .venv/installed  ## compare the lock with the newest releases, and say what is held back and why
	@$(BIN)/python -m tools.outdated

audit: .venv/installed  ## look the locked packages up in the lists of known vulnerabilities
	@$(BIN)/python -m tools.audit

publish: .venv/installed  ## write where the course lives wherever it is named (REPO=owner/name)
	@$(BIN)/python -m tools.publish $(REPO)

tpu-report: .venv/installed  ## ask the TPU compiler about the real models (many hours; resumable; ARGS='--minutes 60')
	@$(BIN)/python -m benchmarks.record_tpu $(ARGS)

clean:  ## remove what these commands made
	rm -rf .venv .venv-train build dist
