"""Population based training: weak trials of 2 Horovod ranks continue from a strong one's checkpoint.

python examples/pbt_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from horovod_tune import DistributedTrainableCreator


def main(population=4, epochs=12, storage_path=None):
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"lr": tune.loguniform(1e-4, 1), "momentum": [0.0, 0.5, 0.9, 0.95]},
        synch=True,
    )
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="pbt_digits",
        config={"lr": tune.loguniform(1e-4, 1), "momentum": 0.5, "max_epochs": epochs},
        metric="accuracy",
        mode="max",
        scheduler=scheduler,
        num_samples=population,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
