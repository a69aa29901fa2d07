"""Optuna with `gptddp train`: it chooses the values, and each trial is a separate run.

    pip install optuna
    python examples/optuna_study.py runs/study 20 --data data --steps 300

20 is the number of trials. The same command again adds as many to the study in runs/study; a trial
that was killed comes first, and its run continues.
"""

import json
import subprocess
import sys
from pathlib import Path

import optuna
from optuna.trial import TrialState

folder, trials, *train = sys.argv[1:]


def objective(trial: optuna.Trial) -> float:
    """The best validation loss of a run, in nats per token."""
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    decay = trial.suggest_float("weight_decay", 0.01, 1.0, log=True)
    run = f"{folder}/lr-{lr:g}-weight-decay-{decay:g}"
    chosen = ["--run-dir", run, "--lr", str(lr), "--weight-decay", str(decay)]
    subprocess.run(["gptddp", "train", *train, *chosen], check=True)
    table = subprocess.run(
        ["gptddp", "runs", run, "-o", "json"], check=True, stdout=subprocess.PIPE
    )
    return float(json.loads(table.stdout)[0]["best_val_loss"])


Path(folder).mkdir(parents=True, exist_ok=True)
storage = f"sqlite:///{folder}/study.db"
study = optuna.create_study(storage=storage, study_name="gptddp", load_if_exists=True)
for cut_off in study.get_trials(states=[TrialState.RUNNING]):
    study.tell(cut_off.number, state=TrialState.FAIL)
    study.enqueue_trial(cut_off.params)
study.optimize(objective, n_trials=int(trials), catch=subprocess.CalledProcessError)
print(f"best: {study.best_value:.4f} with {study.best_params}; `gptddp runs {folder}` has them all")
