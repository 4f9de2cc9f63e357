# The commands that a person types; `make help` lists them. They need Python 3.11 to 3.14, and to install, a network.

PYTHON ?= python3
BIN := .venv/bin
CHAPTERS ?=

# pytest executes copies of the chapters by its plugin nbmake, and writes their outputs into the copies. So the chapters
# themselves stay without outputs; the page of pictures, the site and the tests read the copies.
EXECUTED := build/notebooks
NBMAKE := $(BIN)/python -m pytest --nbmake --overwrite --verbose --no-header
CHOSEN := $(or $(CHAPTERS),notebooks/[0-9]*.ipynb)

# Runs a command without a network, but for the machine itself, over which a notebook talks to its kernel. Where the
# system does not allow that, it says so, and the command has the network.
WITHOUT_NETWORK = without_network() { unshare -rn sh -c 'ip link set lo up && exec "$$@"' sh "$$@"; }; \
	without_network true || without_network() { echo "The chapters are executed with a network."; "$$@"; };

.DEFAULT_GOAL := help
.PHONY: help run lint test test-site test-runtimes lab docs workshop translations checkpoints lock audit set-repo tpu-report clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

# One sentence for a Python that is too old or too new.
CHECK_PYTHON := $(PYTHON) -c 'import sys; \
	fits = (3, 11) <= sys.version_info[:2] <= (3, 14); \
	sentence = "Python 3.11 to 3.14 is needed, and {} is {}.{}: choose one with PYTHON=python3.12, say."; \
	sys.exit(None if fits else sentence.format(sys.executable, *sys.version_info[:2]))'

# Installs again whenever the lock or the project's own metadata changes, and never otherwise. uv takes a tenth of pip's
# time, and comes out of the lock as well. It does not know how pip is configured, so where it fails, pip has a try.
.venv/installed: requirements.lock pyproject.toml
	@$(CHECK_PYTHON)
	@echo "Creating .venv and installing the locked packages (once; it downloads about 1 GB) ..."
	@$(PYTHON) -m venv .venv
	@sed -n '/^uv==/,/[^\]$$/p' requirements.lock >.venv/uv.lock
	@$(BIN)/python -m pip install --quiet --require-hashes -r .venv/uv.lock
	@$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock || \
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "Installed."

# Two chapters at a time on a CPU, and one on an accelerator; WORKERS=1 says it.
COUNT_WORKERS := $(BIN)/python -c "from lab.site.chapters import count_workers; print(count_workers())"
run: .venv/installed  ## execute the chapters, and show their pictures on a page (CHAPTERS=notebooks/04_*.ipynb for some)
	@mkdir -p $(EXECUTED) && cp $(CHOSEN) $(EXECUTED)
	@status=0; \
	$(NBMAKE) --numprocesses=$(or $(WORKERS),$$($(COUNT_WORKERS))) $(addprefix $(EXECUTED)/,$(notdir $(wildcard $(CHOSEN)))) || status=$$?; \
	$(BIN)/python -m lab.site.chapters; \
	exit $$status

lint: .venv/installed  ## check the style of code and notebooks, what is imported, and the Chinese edition
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/deptry .
	@rm -rf build/code-of-chapters
	@$(BIN)/jupyter nbconvert --log-level=ERROR --to python --output-dir build/code-of-chapters notebooks/[0-9]*.ipynb
	@$(BIN)/deptry helpers course build/code-of-chapters --exclude '\.venv' --ignore DEP002 \
	--optional-dependencies-dev-groups lab,docs,test,dev
	@$(BIN)/python -m lab.site.translations --check

test: lint  ## lint, execute the chapters (without a network, where the system allows it), and run the tests
	@rm -rf $(EXECUTED) && mkdir -p $(EXECUTED) && cp notebooks/[0-9]*.ipynb $(EXECUTED)
	@$(WITHOUT_NETWORK) status=0; \
	without_network $(NBMAKE) --numprocesses=2 $(EXECUTED) || status=$$?; \
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --durations=20 || status=$$?; \
	exit $$status

test-site: .venv/installed  ## build the site, and look at it and at JupyterLab in a browser
	@$(BIN)/python -m pytest --site --numprocesses=2 --dist=loadfile --no-loadscope-reorder

test-runtimes: .venv/installed  ## execute chapters on other Pythons and packages, on Colab's for example (RUNTIME=colab)
	@$(BIN)/python -m nox $(if $(RUNTIME),--session $(RUNTIME))

lab: .venv/installed  ## open the chapters in JupyterLab
	@$(BIN)/jupyter lab notebooks

docs: .venv/installed  ## build the site, and the same as an EPUB and a PDF, from executed chapters, into build/site/html
	@$(BIN)/python -m lab.site.build_site

workshop: .venv/installed  ## write the student set and the instructor set, into build/workshop (ARGS='--language zh-CN')
	@$(BIN)/python -m lab.site.workshop $(ARGS)

translations: .venv/installed  ## renew the Chinese edition, and list what to translate (ARGS='--start notebooks/08_*.ipynb')
	@$(BIN)/python -m lab.site.translations $(ARGS)

checkpoints: .venv/installed  ## train the bundled checkpoints anew, into build/training (about a day on 2 cores; resumable)
	@$(BIN)/python -m lab.train $(ARGS)

LOCK := $(BIN)/python -m uv pip compile --quiet --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links \
--custom-compile-command "make lock" $(ARGS)

lock: .venv/installed  ## write the locks and environment.yml anew from pyproject.toml (ARGS=--upgrade for newer versions)
	@$(LOCK) pyproject.toml --universal --python-version 3.11 \
	--extra tpu --extra cluster --extra lab --extra docs --extra test --extra dev --output-file requirements.lock
	@$(LOCK) locks/colab.in --python-version 3.13 --output-file locks/colab.lock
	@$(LOCK) pyproject.toml locks/between.in --python-version 3.12 --output-file locks/between.lock
	@$(LOCK) locks/newest.in --python-version 3.13 --output-file locks/newest.lock
	@$(LOCK) locks/draw.in --universal --python-version 3.11 --output-file locks/draw.lock
	@$(BIN)/python -m lab.site.lock

# Known vulnerabilities that do not reach the course. All are in transformers 4.57.6, the last with Flax models; only
# versions from 5 on mend them. tests/test_supply_chain.py checks what these reasons say.
# A script that converts X-CLIP checkpoints, which the wheel does not have.
EXPLAINED := CVE-2025-14929
# Trainer unpickles its random state: nothing here uses Trainer, and no torch is locked.
EXPLAINED += CVE-2026-1839
# PyTorch models fetch the attention code that a configuration names, by the package kernels: neither is locked.
EXPLAINED += CVE-2026-4372
# LightGlue takes trust_remote_code from a downloaded configuration: a PyTorch model, and no torch is locked.
EXPLAINED += CVE-2026-5241
# save_pretrained writes a downloaded tokenizer's chat templates to paths that they name: only the bundled one is saved.
EXPLAINED += CVE-2026-9856
# generate(custom_generate=...) stores a repository's code unasked: nothing here generates text.
EXPLAINED += CVE-2026-80047

audit: .venv/installed  ## look the locked packages up in the lists of known vulnerabilities
	@$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict \
	--vulnerability-service osv --progress-spinner off $(addprefix --ignore-vuln=,$(EXPLAINED)) $(ARGS)

set-repo: .venv/installed  ## write where the course lives wherever it is named (REPO=owner/name)
	@$(BIN)/python -m lab.site.set_repo $(REPO)

tpu-report: .venv/installed  ## ask the TPU compiler about the real models (many hours; resumable; ARGS='--minutes 60')
	@$(BIN)/python -m lab.record ask/programs $(ARGS)

clean:  ## remove what these commands made
	rm -rf .venv build dist
