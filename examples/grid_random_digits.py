"""A grid over the batch size, each point with random learning rates, on trials of 2 Horovod ranks.

python examples/grid_random_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune

from horovod_tune import DistributedTrainableCreator


def main(num_samples=2, epochs=5, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="grid_random_digits",
        config={
            "batch_size": tune.grid_search([32, 128]),
            "lr": tune.loguniform(1e-3, 1),
            "momentum": tune.sample_from(lambda config: 0.9 if config["lr"] < 0.1 else 0.5),
            "max_epochs": epochs,
        },
        metric="accuracy",
        mode="max",
        num_samples=num_samples,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
