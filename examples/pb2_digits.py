"""Population based bandits (PB2) on trials of 2 Horovod ranks: PBT with a model of what to try next.

python examples/pb2_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers.pb2 import PB2

from horovod_tune import DistributedTrainableCreator


def main(population=4, epochs=12, storage_path=None):
    scheduler = PB2(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_bounds={"lr": [1e-4, 1.0], "momentum": [0.0, 0.95]},
        synch=True,
    )
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="pb2_digits",
        config={"lr": tune.loguniform(1e-4, 1), "momentum": tune.uniform(0.0, 0.95), "max_epochs": epochs},
        metric="accuracy",
        mode="max",
        scheduler=scheduler,
        num_samples=population,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
