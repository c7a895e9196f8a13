"""HyperOpt's TPE with ASHA until the time is up, on trials of 2 Horovod ranks.

pip install 'horovod_tune[hyperopt]'
python examples/hyperopt_asha_digits.py
"""

from digits_mlp import connect_to_ray, train
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from horovod_tune import DistributedTrainableCreator
from horovod_tune.search import HyperOptSearch

SPACE = {
    "lr": tune.loguniform(1e-6, 1e-0),
    "momentum": tune.uniform(0, 0.99),
    "max_epochs": tune.randint(5, 11),
}


def main(time_budget_s=30, num_samples=-1, storage_path=None):
    return tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        name="hyperopt_asha_digits",
        config=SPACE,
        time_budget_s=time_budget_s,
        num_samples=num_samples,
        search_alg=HyperOptSearch(metric="mean_loss", mode="min"),
        scheduler=ASHAScheduler(metric="mean_loss", mode="min", max_t=10),
        storage_path=storage_path,
    )


if __name__ == "__main__":
    connect_to_ray()
    print("best_config:", main().get_best_config("mean_loss", "min", scope="all"))
