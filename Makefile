# Every target builds the virtual environment it needs: Python >= 3.11 and network are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export BASE_IMAGE TORCH EXTRAS IMAGE

help:  ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' Makefile

venv: $(VENV)/.done  ## build the virtual environment

$(VENV)/.done: pyproject.toml image/constraints.txt image/make-venv image/no-gpu.txt
	image/make-venv "$(PYTHON)" "$(VENV)" train,k8s,report,dev
	@touch $@

demo: venv  ## train on four local pods, kill one, see it learn to write: about four minutes
	$(BIN)/python -m gptddp.demo

# A file's tests run in one process, and share what the file has made. Only a test whose claim is about
# time runs alone: it is marked so.
BESIDE = --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: venv  ## all tests that need no cluster
	$(BIN)/python -m pytest $(BESIDE)

# Killed pods, cut networks, full memory, a failing API server: about an hour, as its figures want
# a quiet machine. SHORT=1: ten minutes, two files at a time, without the long rows.
test-faults: venv  ## the fault tests on whole jobs; their figures become docs/faults.md
	@mkdir -p .faults && rm -f .faults/measured.jsonl
	SHORT=$(SHORT) FAULTS_OUT=.faults $(BIN)/python -m pytest tests/faults --timeout 1800 \
	  $(if $(SHORT),--numprocesses 2 --dist loadfile)
	$(if $(SHORT),,ALL_WAYS=1 $(BIN)/python -m pytest tests/k8s/test_failing_server.py)
	$(if $(SHORT),,$(BIN)/python tests/faults/table.py .faults/measured.jsonl)

# On Debian's Slurm, one node of four tasks on this machine, in a temporary folder: three minutes.
test-slurm: venv  ## the tests of docs/slurm.md with a real Slurm; installs it by apt-get if need be
	tests/slurm/install
	$(BIN)/python -m pytest tests/slurm

# Debian's, unpacked into .prometheus: nothing is installed, and no service starts.
test-prometheus: venv  ## a real Prometheus with our rules and dashboard scrapes a job that has faults
	tests/prometheus/install
	$(BIN)/python -m pytest tests/prometheus --timeout 600

# In a folder of its own, which nothing else sees.
.transformers/.done: $(VENV)/.done image/constraints.txt
	rm -rf .transformers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target .transformers \
	  --constraint image/constraints.txt transformers
	@touch $@

test-transformers: .transformers/.done  ## the same logits as Hugging Face's transformers, both ways
	PYTHONPATH=.transformers HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/hugging_face

# In a folder of its own, which nothing else sees: ten minutes beside other work.
.trackers/.done: $(VENV)/.done image/constraints.txt
	rm -rf .trackers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target .trackers \
	  --constraint image/constraints.txt wandb trackio tensorboard
	@touch $@

test-track: .trackers/.done  ## --track with real trackers, over kills of rank 0 and of what feeds them
	PYTHONPATH=.:.trackers $(BIN)/python -m pytest tests/track --timeout 600

# In a headless Chromium; pictures of what it shows lie in .report.
test-report: venv  ## the page of gptddp report in a browser; installs it by apt-get if need be
	tests/browser/install
	@mkdir -p .report
	PICTURES=.report $(BIN)/python -m pytest tests/browser

# A minute and a half: every command of the page in a shell, nodes of network namespaces, a kill.
test-examples: venv  ## docs/learn-ddp.md, command after command, and the tests of examples/
	$(BIN)/python -m pytest tests/examples/test_*.py tests/examples/walk --timeout 600

lint: venv  ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Short rounds, a quarter of an hour in all: benchmarks/NAME.py alone takes its time, and flags.
BENCHMARKS = checkpoint loader trainer sums optimizers recovery soak
bench-checkpoint = --saves 3
bench-loader = --seq-len 256 --lanes 8 --batch 48 --steps 50
bench-trainer = --rounds 2
bench-sums = --shapes tiny --worlds 1,4 --rounds 2
bench-optimizers = --out .bench/optimizers-short --steps 20 --seeds 1 --rates 3e-3
bench-recovery = --rounds 1
bench-soak = --minutes 3 --every 45

bench: venv  ## the benchmarks: ratios, measured side by side; ONLY=checkpoint for one of them
	@set -e; $(foreach name,$(or $(ONLY),$(BENCHMARKS)),echo "== $(name)"; \
	  $(BIN)/python benchmarks/$(name).py $(bench-$(name));)

image:  ## build the image gptddp:<version>; BASE_IMAGE=... TORCH=cpu|cuda EXTRAS=wandb IMAGE=...
	image/build

cluster:  ## a kind cluster with the operator and our image; SOURCE=registry|modules
	tests/cluster/up $(SOURCE)

cluster-down:  ## remove that cluster; its shared folder and the cache stay
	tests/cluster/down

# KUBECONFIG counts only on make's command line: tests are not to run on a cluster by accident. The
# drills freeze and kill nodes, and measure: they run first, and alone. Their figures become a section
# of docs/faults.md, but in .ci/run.
ON_CLUSTER = --timeout 1800 $(if $(filter command line,$(origin KUBECONFIG)),--kubeconfig "$(KUBECONFIG)")

test-cluster: venv  ## the tests on that cluster, started if need be; KUBECONFIG=... for another one
	@mkdir -p .faults && rm -f .faults/cluster.jsonl
	FAULTS_OUT=.faults $(BIN)/python -m pytest tests/cluster/test_drills.py -s $(ON_CLUSTER)
	$(BIN)/python -m pytest tests/cluster --ignore tests/cluster/test_drills.py $(ON_CLUSTER) \
	  --numprocesses 2 --dist loadfile
	$(if $(GPTDDP_CI),,$(BIN)/python tests/faults/table.py .faults/cluster.jsonl)

# A Prometheus that discovers pods, built from its Go module into the cache of the cluster: five
# minutes the first time.
test-discovery: venv  ## a Prometheus on that cluster finds a job's pods by itself; wants Go, and root
	built=$$(tests/cluster/discovery/prometheus) && PATH=$$built:$$PATH \
	  $(BIN)/python -m pytest tests/cluster/discovery --timeout 1800 -s

# Kueue is built from its Go module, once, in five minutes of two cores; its tests remove it again.
test-kueue: venv  ## the tests of docs/clusters.md with a real Kueue, on that cluster
	$(BIN)/python -m pytest tests/cluster/kueue --timeout 900 -s

wheel: venv  ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean:  ## remove the virtual environment, caches and the demo
	rm -rf "$(VENV)" .transformers .trackers .prometheus dist demo .bench .report .pytest_cache \
	  .mypy_cache .ruff_cache

.PHONY: help venv demo test test-faults test-slurm test-prometheus test-transformers test-track \
  test-examples test-report test-discovery lint bench image cluster cluster-down test-cluster \
  test-kueue wheel clean
