# `make demo` and `make test` set everything up in .venv first; nothing else needs to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# Where an image forbids bytecode, each of the tests' processes would compile thousands of modules anew.
export PYTHONDONTWRITEBYTECODE :=
# Test processes, one thread each.
JOBS ?= 2
test test-plain test-all exhaustive: export OMP_NUM_THREADS = 1
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-plain test-all exhaustive lint docs tutorials bench build gpu wheels hub-kernel clean

demo: $(INSTALLED)  ## train a small RAOE encoder on the built-in corpus, evaluate and save it (3 minutes on 2 cores)
	$(RUN) -m raoe_kernels
	$(RUN) -m raoe_train train demo --output runs/demo

test: $(INSTALLED)  ## numbers, losses, data, training: three minutes on two cores
	$(RUN) -m pytest -q -n $(JOBS) -m "not slow"

# Of the last commit: a clone has no file that git does not track, so none that was compiled.
test-plain: $(INSTALLED)  ## the same tests in a clone of the repository without compiled modules
	rm -rf build/plain
	git clone -q . build/plain
	cd build/plain && export PYTHONPATH=$$PWD PYTHON=$(abspath $(RUN)) && \
	$$PYTHON -c "import os, raoe_kernels as r; assert r.__file__.startswith(os.getcwd()), r.__file__; \
	assert 'never built' in r.backends('cpu')['raoe_loss']['native']" && \
	$$PYTHON -m pytest -q -n $(JOBS) -m "not slow"
	rm -rf build/plain

test-all: $(INSTALLED)  ## the other tests: Triton's interpreter, builds, packaging, benchmarks, long trainings
	$(RUN) -m pytest -q -n $(JOBS) --maxschedchunk 1 -m "slow and not exhaustive" --durations 20

exhaustive: $(INSTALLED)  ## more combinations of what `make test-all` tests, which CI leaves out
	$(RUN) -m pytest -q -n $(JOBS) -m exhaustive

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: $(INSTALLED)  ## the documentation as a site, in build/site; a dead link or a docstring that cannot be read fails
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

tutorials: $(INSTALLED)  ## run the tutorials and write the outputs that their pages keep
	$(RUN) -m tests.pages docs/tutorials/*.md

bench: $(INSTALLED)  ## ratios against the peers, side by side
	$(RUN) -m benchmarks

build: $(INSTALLED)  ## compile csrc again, in place
	$(RUN) setup.py build_ext --inplace

wheels: $(INSTALLED)  ## in dist/: a wheel for each Python here, one for any platform, the sdist; audited, tried in empty environments
	$(RUN) -m tests.packaging.wheels

hub-kernel: $(INSTALLED)  ## dist/raoe-kernels: raoe_kernels as Hugging Face's `kernels` loads it
	$(RUN) -m tests.packaging.hub_kernel

# With MINUTES=9, again and again, where one command may not take as long as all of it; PARTS="build test-cosine cosine".
gpu:  ## on a machine with a GPU, with the Python given: build in place, all GPU tests, all benchmarks, results
	$(PYTHON) -m benchmarks.gpu $(PARTS) $(if $(RESULTS),--results $(RESULTS)) $(if $(MINUTES),--minutes $(MINUTES))

# torch comes first and from the constraints, so that nothing else decides which build of it is taken. Bytecode is made
# of what is imported, when it is: pip would make it of 16,000 files. Beside pip, which keeps
# one core busy, csrc is compiled in build/native. The build at the end finds it there and puts the modules in place.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt ninja pybind11
	$(RUN) csrc/build_modules.py > /dev/null 2>&1 & \
	$(RUN) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt torch numpy && \
	RAOE_KERNELS_BUILD=none $(RUN) -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e ".[train,dev]" && \
	wait
	$(RUN) csrc/build_modules.py > /dev/null
	touch $@

clean:
	rm -rf build dist *.egg-info raoe_kernels/_native_*.so raoe_kernels/_build_info.json
