"""The median stopping rule on trials of 2 Horovod ranks.

python examples/median_stopping_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers import MedianStoppingRule

from horovod_tune import DistributedTrainableCreator


def main(num_samples=8, epochs=10, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="median_stopping_digits",
        config={"lr": tune.loguniform(1e-4, 1), "max_epochs": epochs},
        metric="accuracy",
        mode="max",
        scheduler=MedianStoppingRule(time_attr="epoch", grace_period=2, min_samples_required=3),
        num_samples=num_samples,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
