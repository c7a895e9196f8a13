"""ASHA on trials of 2 Horovod ranks, with an initial configuration and a limit on wall-clock time.

python examples/asha_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from horovod_tune import DistributedTrainableCreator

MIN_NUMBER_OF_EPOCHS, MAX_NUMBER_OF_EPOCHS, ETA = 2, 10, 2
MAX_WALLCLOCK_TIME_S = 12 * 60
SPACE = {
    "lr": tune.loguniform(1e-2, 1),
    "batch_size": tune.randint(32, 256),
    "max_epochs": MAX_NUMBER_OF_EPOCHS,
}
INITIAL_CONFIG = {"lr": 0.1, "batch_size": 128}


def main(num_samples=12, time_budget_s=MAX_WALLCLOCK_TIME_S, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="asha_digits",
        config=SPACE,
        metric="accuracy",
        mode="max",
        search_alg=tune.search.BasicVariantGenerator(points_to_evaluate=[INITIAL_CONFIG]),
        scheduler=ASHAScheduler(
            time_attr="epoch",
            max_t=MAX_NUMBER_OF_EPOCHS,
            grace_period=MIN_NUMBER_OF_EPOCHS,
            reduction_factor=ETA,
        ),
        num_samples=num_samples,
        time_budget_s=time_budget_s,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().best_config)
