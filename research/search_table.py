"""Trains the real runs in whose table `search_quality.py` looks up results.

972 multilayer perceptrons on scikit-learn's handwritten digits, 12 epochs of SGD each: every combination of
width, learning rate, batch size, momentum and activation. Takes about 10 minutes on one core and writes
research/results/search_table.csv, which is in the repository.

    OMP_NUM_THREADS=1 python research/search_table.py
"""

import csv
import itertools
import warnings
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

TABLE = Path(__file__).parent / "results" / "search_table.csv"
GRID = {
    "log2_width": [3, 4, 5, 6],
    "log10_lr": [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0],
    "batch_size": [16, 64, 256],
    "momentum": [0.0, 0.9, 0.99],
    "activation": ["relu", "tanh", "logistic"],
}


def main() -> None:
    warnings.simplefilter("ignore")
    digits, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        digits / 16.0, labels, test_size=0.25, random_state=0, stratify=labels
    )
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*GRID, "log_loss", "accuracy"])
        for row in itertools.product(*GRID.values()):
            width, lr, batch_size, momentum, activation = row
            model = MLPClassifier(
                (2**width,),
                activation=activation,
                solver="sgd",
                learning_rate_init=10.0**lr,
                batch_size=batch_size,
                momentum=momentum,
                max_iter=12,
                random_state=0,
            )
            try:
                model.fit(train_x, train_y)
                probabilities = model.predict_proba(test_x)
                loss = log_loss(test_y, probabilities.clip(1e-7, 1), labels=model.classes_)
                accuracy = model.score(test_x, test_y)
            except ValueError:  # the weights overflowed: a diverged run
                loss, accuracy = float("nan"), float("nan")
            writer.writerow([*row, f"{loss:.6f}", f"{accuracy:.4f}"])
            file.flush()


if __name__ == "__main__":
    main()
