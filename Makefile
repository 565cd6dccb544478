# Every target sets up what it needs; a second call installs nothing again.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BOOK   := _build/html
PART   := $(BIN)/python _ext/minutes.py run
XML     = --junitxml=_build/minutes/$@.xml
NBVAL  := --nbval-lax --nbval-cell-timeout=120 --nbval-kernel-name=python3 -p no:cacheprovider -q -n 2 --dist loadscope

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup book test soak lint unit notebooks pages pdf lab serve chapter bench picture dist links clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with the exact versions of requirements.txt and this package

$(READY): requirements.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

book: $(READY)  ## execute every notebook and build the HTML book
	@rm -rf $(BOOK) _build/.doctrees _build/ledger.jsonl
	@$(PART) $@ $(BIN)/jupyter-book build . -q -n -W --keep-going
	@echo "The book is at file://$(CURDIR)/$(BOOK)/index.html"

test: lint unit notebooks book pages  ## run everything: lint, types, tests, notebooks, the book, links, browser
	@$(BIN)/python _ext/minutes.py show

soak: $(READY)  ## what takes long, once for an issue: many seeds, a busy machine (ROOM=grading: that alone; see _build/soak)
	@case "$(ROOM)" in ""|*book*) test -f $(BOOK)/index.html || $(MAKE) book;; esac
	@$(BIN)/python _ext/soak.py $(ROOM)

lint: $(READY)  ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

unit: $(READY)  ## run the tests of the library
	@DTLIB_LEDGER=$(CURDIR)/_build/unit-ledger.jsonl $(PART) $@ $(BIN)/pytest -q -n 2 --dist loadscope --no-loadscope-reorder $(XML) tests --ignore=tests/book

notebooks: $(READY)  ## execute exercises and solutions with nbval (`make book` executes the chapters)
	@DTLIB_LEDGER=$(CURDIR)/_build/nbval-ledger.jsonl $(PART) $@ $(BIN)/pytest $(NBVAL) $(XML) exercises solutions

pages: $(READY)  ## open the pages of the book that was built, and follow their links
	@$(PART) $@ $(BIN)/pytest -q -n 2 --dist loadscope $(XML) tests/book

lab: $(READY)  ## open JupyterLab on the exercises
	@$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/exercises

pdf: $(READY)  ## print the book that was built into _build/book.pdf
	@$(PART) $@ $(BIN)/python _ext/book_pdf.py $(BOOK) _build/book.pdf

serve: book  ## build the book and serve it on this machine
	@$(BIN)/python -m http.server --directory $(BOOK) --bind 127.0.0.1 8000

chapter: $(READY)  ## lay out the empty rooms of a chapter: make chapter STEM=batch TITLE="batch size"
	@$(BIN)/python _ext/new_chapter.py "$(STEM)" "$(TITLE)"
	@$(BIN)/ruff check -q --fix --select I,RUF022 dtlib && $(BIN)/ruff format -q dtlib
	-@$(BIN)/pytest -q --no-header --tb=short tests/test_course.py

bench: $(READY)  ## measure against the alternatives, each table in one run
	@$(BIN)/python -m benchmarks

picture: $(READY)  ## draw the README's picture from a fresh measurement
	@$(BIN)/python _ext/readme_picture.py _static/measured.svg

dist: book pdf  ## build what a release publishes, in _build/dist: the wheel, book and exercises as zips, the PDF, checksums
	@$(BIN)/python _ext/dist.py

links: $(READY)  ## follow the links that lead out of the book (needs a network; no part of `make test`)
	@mkdir -p _build && sed 's/execute_notebooks: cache/execute_notebooks: "off"/; s#: _ext$$#: ../_ext#' _config.yml > _build/links.yml
	@$(BIN)/jupyter-book build . -q --config _build/links.yml --path-output _build/links --builder linkcheck

clean:  ## remove what was built (not .venv)
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
