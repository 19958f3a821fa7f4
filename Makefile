# Everything sets itself up: on a fresh clone `make reproduce` and `make test` each work alone.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
PROFILE ?= icon_world
BIN := .venv/bin
READY := .venv/ready
# stages call python by name
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup data reproduce test lab world params preflight clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## the environment in .venv: made once, brought up to date when settings.ini changes (6.4 GB, about 8 minutes)

$(READY): settings.ini constraints.txt setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; install one or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

data: setup ## the embedded world and models, from the remote inside the repository
	$(BIN)/dvc pull --quiet data.dvc

reproduce: setup data ## every stage of the pipeline; what was killed goes on where it stopped
	$(BIN)/dvc repro --force

test: setup data ## pytest, then every component notebook as its own test
	$(BIN)/python -m pytest tests
	$(BIN)/nbdev_test --n_workers 2

lab: setup data ## JupyterLab
	$(BIN)/jupyter lab

# what the text models read besides the world; nbs/build/text_models.ipynb says what it is and where to get it
READINGS := datasets/captions/coco_val2017.txt datasets/captions/factual_train.csv /usr/share/wordnet/data.noun

world: setup ## build the embedded world and models anew, from seeds (about two hours); not part of `reproduce`
	@for file in $(READINGS); do test -e $$file || { echo "error: $$file: not there; the first cell of nbs/build/text_models.ipynb says what" \
		"it is and where to get it"; missing=1; }; done; test -z "$$missing"
	@mkdir -p artifacts/notebooks
	for name in world clip siglip text_models; do \
		$(BIN)/papermill --no-progress-bar -k python3 nbs/build/$$name.ipynb artifacts/notebooks/build-$$name.ipynb || exit 1; done
	@echo "data/ is built; keep it with: $(BIN)/dvc add data && $(BIN)/dvc push data.dvc"

params: data ## params.yaml from conf/ for PROFILE (default icon_world)
	@$(BIN)/python -c 'from cs_clip.cli import write_params; write_params("$(PROFILE)")'

preflight: setup ## what PROFILE still needs (files, models, space, device); starts nothing
	@$(BIN)/cs_clip_preflight $(PROFILE)

clean: ## delete what the pipeline and the tests leave behind; data/, results/, figures/ and .venv stay
	rm -rf artifacts .pytest_cache .hypothesis build dist
	find cs_clip tests nbs -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
