"""BOHB on trials of 2 Horovod ranks; the trials pause, and resume from their checkpoints.

pip install 'horovod_tune[bohb]'
python examples/bohb_digits.py

The space is a ConfigSpace, as in older scripts; with `main(use_tune_space=True)` it is given as Tune domains.
"""

import ConfigSpace as CS
from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers import HyperBandForBOHB

from horovod_tune import DistributedTrainableCreator
from horovod_tune.search import TuneBOHB

TUNE_SPACE = {
    "lr": tune.loguniform(1e-4, 1e-0),
    "weight_decay": tune.loguniform(1e-5, 1e-2),
    "batch_size": tune.choice([16, 32, 64, 128]),
    "width": tune.choice([16, 32, 64]),
}


def config_space():
    space = CS.ConfigurationSpace(seed=1)
    space.add(CS.UniformFloatHyperparameter("lr", lower=1e-4, upper=1e-0, log=True))
    space.add(CS.UniformFloatHyperparameter("weight_decay", lower=1e-5, upper=1e-2, log=True))
    space.add(CS.CategoricalHyperparameter(name="batch_size", choices=[16, 32, 64, 128]))
    space.add(CS.CategoricalHyperparameter(name="width", choices=[16, 32, 64]))
    return space


def main(num_samples=9, max_t=9, use_tune_space=False, storage_path=None):
    algo = TuneBOHB(
        None if use_tune_space else config_space(), max_concurrent=4, metric="mean_loss", mode="min", seed=1
    )
    bohb = HyperBandForBOHB(time_attr="training_iteration", metric="mean_loss", mode="min", max_t=max_t)
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="bohb_digits",
        config={"max_epochs": 100, **(TUNE_SPACE if use_tune_space else {})},
        scheduler=bohb,
        search_alg=algo,
        num_samples=num_samples,
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    results = main()
    print("best_config:", results.get_best_config("mean_loss", "min", scope="all"))
